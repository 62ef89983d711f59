// Common mistakes on the command line, failed starts, and closed standard streams.
#include <sys/stat.h>

#include <filesystem>

#include "core/cpu_features.h"
#include "support/no_mpi.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::no_mpi;
using test::Outcome;
using test::TinyRun;

/// A shell's command line, with the program as $SLUICE.
int shell(const std::string& command) {
  const int status =
      std::system(("SLUICE='" + std::string(std::getenv("SLUICE_BINARY")) + "'; " + command).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("without a command the program prints its help; for a misspelt one it suggests another",
          "[command_line]") {
  const TinyRun t;
  const Outcome help = t.sluice({});
  CHECK(help.code == 0);
  CHECK_THAT(help.out, Contains("sluice train CONFIG"));
  const Outcome misspelt = t.sluice({"trian", t.config});
  CHECK(misspelt.code == 64);
  CHECK_THAT(misspelt.err, Contains("unknown command") && Contains("did you mean train?"));
}

TEST_CASE("a start that fails leaves nothing behind", "[command_line]") {
  const TinyRun t;
  const std::string weights = "train.init_from=" + t.folder / "no_weights";
  const Outcome fresh = t.train({weights, "--run-dir", t.folder / "runs/deep/a"});
  CHECK(fresh.code == 66);
  CHECK_FALSE(io::exists(t.folder / "runs"));

  // An existing folder keeps its content and gets no new files.
  io::make_directories(t.run);
  test::write_bytes(t.run + "/notes.txt", "mine");
  test::write_bytes(t.run + "/config.yaml", "name: before\n");
  CHECK(t.train({weights}).code == 66);
  CHECK(io::list_directory(t.run) == std::vector<std::string>{"config.yaml", "notes.txt"});
  CHECK(io::read_file(t.run + "/config.yaml") == "name: before\n");
  CHECK(t.train().code == 0);
  CHECK(io::exists(t.run + "/lock"));
  // The same for the folder of an existing run.
  CHECK(t.train({"--fresh"}).code == 64);
  CHECK(io::exists(t.run + "/ckpt/step_00000008/MANIFEST.json"));
}

TEST_CASE("a text given as token files, and a configuration given as a run, are explained",
          "[command_line]") {
  const TinyRun t;
  test::write_bytes(t.folder / "book.txt", "once upon a time");
  for (const char* path : {"book.txt", "book"}) {
    const Outcome outcome = t.train({"data.train=[{name: book, path: " + t.folder / path + "}]"});
    INFO(outcome.err);
    CHECK(outcome.code == 66);
    CHECK_THAT(outcome.err,
               Contains("sluice tokenize " + t.folder / "book.txt" + " -o " + t.folder / "book"));
  }
  const Outcome eval = t.sluice({"eval", t.config});
  CHECK(eval.code == 66);
  CHECK_THAT(eval.err, Contains("tiny.yaml is a file") && Contains("configuration"));
  REQUIRE(t.train({"optimizer.lr", "=", "1e-3"}).code == 0);
  CHECK_THAT(t.sluice({"eval", t.config}).err, Contains("whose run is") && Contains("run"));
  const Outcome train = t.sluice({"train", t.run});
  CHECK(train.code == 64);
  CHECK_THAT(train.err, Contains("run/config.yaml"));
}

TEST_CASE("a pipe in place of a run's file is refused without blocking", "[command_line]") {
  for (const char* name : {"lock", "console.log", "metrics.jsonl"}) {
    const TinyRun t;
    io::make_directories(t.run);
    REQUIRE(::mkfifo((t.run + "/" + name).c_str(), 0666) == 0);
    test::Program program(t.folder.path, t.train_arguments());
    if (!test::wait_until([&] { return program.over(); }, 60))
      program.signal(SIGKILL);  // it would wait forever
    const Outcome outcome = program.wait();
    INFO(name << outcome.out << outcome.err);
    CHECK((outcome.code == 73 || outcome.code == 65));
    CHECK_THAT(outcome.err, Contains(name));
  }
}

TEST_CASE("closed streams become /dev/null; failed output is an error", "[command_line]") {
  const TinyRun t;
  std::string command = "cd " + t.folder.path + "; \"$SLUICE\" train tiny.yaml <&- >&- 2>&-";
  CHECK(shell(command) == 0);
  CHECK_THAT(io::read_file(t.run + "/lock"), Catch::StartsWith("pid ") && !Contains("step"));
  CHECK_THAT(io::read_file(t.run + "/console.log"), Contains("8/8"));
  for (const std::string& what : std::vector<std::string>{"--help", "train --help", "plan " + t.config,
                                                          "config reference", "checkpoint list " + t.run}) {
    INFO(what);
    CHECK(shell("\"$SLUICE\" " + what + " >/dev/full 2>" + t.folder / "err") == 73);
    CHECK_THAT(io::read_file(t.folder / "err"), Contains("standard output"));
    CHECK(shell("\"$SLUICE\" " + what + " | head -c 1 >/dev/null") == 0);
  }
}

TEST_CASE("an error has its exit code also where standard error cannot be written", "[command_line]") {
  const TinyRun t;
  struct Case {
    const char* arguments;
    int code;
  };
  for (const auto& [arguments, code] : {Case{"train none.yaml", 66},
                                        {"trian", 64},
                                        {"plan tiny.yaml a=1", 64},
                                        {"train tiny.yaml optimizer.lr=1e30 train.max_steps=200", 78}}) {
    INFO(arguments);
    CHECK(shell("cd " + t.folder.path + "; \"$SLUICE\" " + arguments + " >/dev/null 2>/dev/full") == code);
    // The reader has gone before the program writes.
    shell("cd " + t.folder.path +
          "; rm -rf run gone; (while [ ! -e gone ]; do sleep 0.01; done; \"$SLUICE\" " + arguments +
          "; echo $? >code) 2>&1 | touch gone");
    CHECK(io::read_file(t.folder / "code") == fmt::format("{}\n", code));
  }
  // Unbuffered, so that already the first line of the help cannot be written.
  CHECK(shell("stdbuf -o0 \"$SLUICE\" train --help >/dev/full 2>" + t.folder / "err") == 73);
  CHECK_THAT(io::read_file(t.folder / "err"), Contains("standard output"));
}

TEST_CASE("names that are not UTF-8, and a deleted working folder", "[command_line]") {
  const TinyRun t;
  const std::string odd = t.folder /
                          "od\xff"
                          "d.yaml";
  std::filesystem::copy_file(t.config, odd);
  const Outcome named = t.sluice({"train", odd, "name=b\xff"});
  CHECK(named.code == 64);
  CHECK_THAT(named.err, Contains("not UTF-8"));
  const Outcome plain = t.sluice({"train", odd, "--run-dir", t.folder / "odd"});  // the file names the run
  INFO(plain.err);
  CHECK(plain.code == 0);
  io::make_directories(t.folder / "gone");
  CHECK(shell("cd " + t.folder / "gone" + " && rmdir ../gone && \"$SLUICE\" train ../tiny.yaml 2>" +
              t.folder / "err") == 66);
  CHECK_THAT(io::read_file(t.folder / "err"), Contains("working folder"));
}

TEST_CASE("idle threads sleep after a short spin unless the user has set otherwise", "[command_line]") {
  const TinyRun t;
  // The environment of the second execution of the program.
  const auto seen = [&](const std::string& before) {
    shell(before + " OMP_DISPLAY_ENV=verbose \"$SLUICE\" --version >/dev/null 2>" + t.folder / "env");
    const std::string text = io::read_file(t.folder / "env");
    const size_t last = text.rfind("GOMP_SPINCOUNT");
    return last == std::string::npos ? text : text.substr(last, text.find('\n', last) - last);
  };
  CHECK_THAT(seen("env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY"), Contains("'1000'"));
  CHECK_THAT(seen("GOMP_SPINCOUNT=77"), Contains("'77'"));
  CHECK_THAT(seen("env -u GOMP_SPINCOUNT OMP_WAIT_POLICY=passive"), Contains("'0'"));
}

TEST_CASE("SLUICE_ISA=avx512_bf16 asks for products in bf16, and avx512 for products in f32",
          "[command_line]") {
  const TinyRun t;
  const auto seen = [&](const std::string& isa) {
    const std::string out = t.folder / "out";
    shell("SLUICE_ISA=" + isa + " \"$SLUICE\" doctor --run-dir " + t.folder / "runs" + " >" + out + " 2>&1");
    return io::read_file(out);
  };
  CHECK_THAT(seen("avx512"), Contains("computed through f32"));
  if (cpu_features().avx512_bf16)
    CHECK_THAT(seen("avx512_bf16"), Contains("matrix products in hardware"));
  else
    WARN("skipped: this processor has no AVX512-BF16");
  CHECK_THAT(seen("amx_emulated"), Contains("matrix products in software, for tests (amx_emulated)"));
}

TEST_CASE("ranks that wait yield their core unless the user has set otherwise", "[command_line][ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  const auto seen = [&](const std::string& before) {
    const std::string out = t.folder / "out";
    shell("env -u OMPI_MCA_mpi_yield_when_idle OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " +
          before + " mpirun --oversubscribe -n 2 \"$SLUICE\" doctor --run-dir " + t.folder / "runs" + " >" +
          out + " 2>&1");
    return io::read_file(out);
  };
  CHECK_THAT(seen(""), Contains("OMPI_MCA_mpi_yield_when_idle=1"));
  CHECK_THAT(seen("OMPI_MCA_mpi_yield_when_idle=0"), Contains("OMPI_MCA_mpi_yield_when_idle=0"));
}

TEST_CASE("more threads than cores cause a warning", "[command_line]") {
  const TinyRun t;
  const Outcome many = t.train({"train.threads=64", "train.check_limits=false"});
  INFO(many.out << many.err);
  CHECK_THAT(many.out + many.err, Contains("64 threads share"));
  CHECK_THAT(t.train({"--run-dir", t.folder / "one"}).err, !Contains("share"));
}

}  // namespace sluice
