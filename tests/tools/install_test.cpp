// The program says what it is, and works where it is installed, without its sources.
#include <filesystem>

#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using Catch::Matches;
using test::Outcome;
using test::Program;
using test::TinyRun;

/// A shell's command line; its standard output.
std::string output_of(const std::string& command, int expected = 0) {
  const test::TemporaryFolder folder;
  const std::string out = folder / "out.txt";
  const int status = std::system(("( " + command + " ) >" + out + " 2>&1").c_str());
  const std::string text = io::read_file(out);
  INFO(command << "\n" << text);
  CHECK((WIFEXITED(status) ? WEXITSTATUS(status) : -1) == expected);
  return text;
}

std::string binary() { return std::filesystem::absolute(std::getenv("SLUICE_BINARY")); }

/// What the build writes of the commit of `source`.
std::string commit_of(const std::string& source, const std::string& header) {
  output_of("cmake -DSOURCE=" + source + " -DOUTPUT=" + header +
            " -P " SLUICE_SOURCE_DIR "/src/core/commit.cmake");
  const std::string text = io::read_file(header);
  const size_t begin = text.find('"') + 1;
  return text.substr(begin, text.find('"', begin) - begin);
}

}  // namespace

TEST_CASE("--version names the commit, the compiler and the libraries; run.json keeps the same",
          "[version]") {
  const TinyRun t;
  const Outcome version = t.sluice({"--version"});
  CHECK(version.code == 0);
  CHECK_THAT(version.out, Matches("sluice \\d+\\.\\d+\\.\\d+\n"
                                  "  commit            ([0-9a-f]{7,}(-dirty)?|unknown commit)\n"
                                  "  compiler          \\S+ \\S+\n"
                                  "  build type        .+\n"
                                  "  instruction sets  baseline.*; here \\w+\n"
                                  "  CUDA              (off|emulated on the CPU.*|toolkit .*)\n"
                                  "  MPI               .+\n"
                                  "  matrix products   oneDNN .+, OpenBLAS .+\n"));
  REQUIRE(t.train({"train.max_steps=1"}).code == 0);
  const auto run = nlohmann::json::parse(io::read_file(t.run + "/run.json"));
  for (const char* key :
       {"commit", "compiler", "build_type", "instruction_sets", "cuda", "mpi", "matrix_products"}) {
    INFO(key);
    CHECK_THAT(version.out, Contains(" " + run["build"][key].get<std::string>()));
  }
  CHECK_THAT(version.out, Contains("sluice " + run["version"].get<std::string>() + "\n"));
}

TEST_CASE("the commit is found at build time, and written only when it is another", "[version]") {
  const test::TemporaryFolder folder;
  const std::string source = folder / "source", header = folder / "commit.h", git = "git -C " + source + " ";
  io::make_directories(source);
  CHECK(commit_of(source, header) == "unknown");
  const auto written = std::filesystem::last_write_time(header);
  if (std::system("command -v git >/dev/null") != 0) return;
  // Unpacked inside of a repository that is another's.
  output_of("git -C " + folder.path + " init -q");
  CHECK(commit_of(source, header) == "unknown");
  CHECK(std::filesystem::last_write_time(header) == written);

  test::write_bytes(source + "/a.txt", "a");
  output_of(git + "init -q && " + git + "add a.txt && " + git +
            "-c user.name=a -c user.email=a@b -c commit.gpgsign=false commit -q -m a && " + git + "tag v9");
  const std::string commit = commit_of(source, header);
  CHECK_THAT(commit, Matches("[0-9a-f]{12}"));
  CHECK(output_of(git + "rev-parse HEAD").substr(0, 12) == commit);
  test::write_bytes(source + "/a.txt", "b");
  CHECK(commit_of(source, header) == commit + "-dirty");
}

TEST_CASE("installed into a folder of its own, the program, configurations and scripts work together",
          "[install]") {
  const TinyRun t;
  const std::string prefix = t.folder / "prefix", share = prefix + "/share/sluice";
  output_of("cmake --install " + std::filesystem::path(binary()).parent_path().string() + " --prefix " +
            prefix);
  const std::string sluice = prefix + "/bin/sluice";
  CHECK(output_of("cd / && " + sluice + " --version") == output_of(binary() + " --version"));

  // Another folder, an installed configuration that extends another, and a script.
  const std::string run = t.folder / "elsewhere/run";
  io::make_directories(t.folder / "elsewhere");
  output_of(
      "cd " + t.folder / "elsewhere" + " && " + sluice + " train " + share +
      "/configs/quickstart/gated.yaml run_dir=run train.max_steps=2 optimizer.warmup_steps=0 data.seq_len=16 "
      "model.hidden_size=16 model.num_hidden_layers=1 model.match_parameters_of=null "
      "train.global_batch_size=2 "
      "train.micro_batch_size=2 "
      "'data.train=[{name: a, path: " +
      t.folder / "train" + "}]' 'data.validation=[{name: a, path: " + t.folder / "held_out" + "}]'");
  CHECK(io::exists(run + "/ckpt/step_00000002/MANIFEST.json"));
  output_of("cd " + t.folder / "elsewhere" + " && env -u SLUICE_BINARY -u SLUICE " + share +
            "/scripts/report --tables-only run -o report");
  CHECK(io::exists(t.folder / "elsewhere/report/report.md"));

  // Nothing that was installed as text names the folder of the sources.
  output_of("grep -rI -F '" SLUICE_SOURCE_DIR "/' " + prefix, 1);
  CHECK_FALSE(io::exists(share + "/scripts/setup"));
}

TEST_CASE("completion knows commands, options and where files stand", "[completion]") {
  const auto completed = [&](const std::string& words, int at) {
    return output_of("bash -c 'source <(" + binary() + " completion bash); COMP_WORDS=(" + words +
                     ") COMP_CWORD=" + std::to_string(at) + "; _sluice; echo ${COMPREPLY[@]}'");
  };
  CHECK(completed("sluice tr", 1) == "train\n");
  CHECK(completed("sluice checkpoint ver", 2) == "verify\n");
  CHECK(completed("sluice train a.yaml --fr", 3) == "--fresh\n");
  CHECK(completed("sluice config show --fresh", 3) == "\n");
  CHECK(completed("sluice train conf", 2) == "\n");  // files, by the shell itself
  CHECK_THAT(output_of(binary() + " completion zsh"), Catch::StartsWith("#compdef sluice\n"));
  output_of(binary() + " completion fish", 64);
}

}  // namespace sluice
