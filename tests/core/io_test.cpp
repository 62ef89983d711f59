#include "core/io.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <catch2/catch.hpp>

#include "support/temp_folder.h"

using namespace sluice;
using Catch::Matchers::Contains;

namespace {

void create(const std::string& path, const std::string& content) {
  io::OutputFile file(path, io::OutputFile::Mode::create_new);
  file.write(content);
  file.fsync();
  file.close();
}

}  // namespace

TEST_CASE("files are written, appended to, read, listed and removed", "[io]") {
  const TempFolder folder;
  create(folder / "b", "one\n");
  {
    io::OutputFile file(folder / "b", io::OutputFile::Mode::append);
    file.write("two\n");
  }
  CHECK(io::read_file(folder / "b") == "one\ntwo\n");
  CHECK(io::file_size(folder / "b") == 8);
  CHECK_THROWS_WITH(create(folder / "b", ""), Contains("cannot create ") && Contains("(EEXIST)"));
  io::make_directories(folder / "x/y/z");
  io::make_directories(folder / "x/y/z");
  CHECK(io::is_directory(folder / "x/y/z"));
  create(folder / "x/y/file", "");
  CHECK(io::read_file(folder / "x/y/file").empty());
  CHECK(io::list_directory(folder.path) == std::vector<std::string>{"b", "x"});
  CHECK(io::glob(folder / "?").size() == 2);
  CHECK(io::glob(folder / "nothing*").empty());
  io::rename(folder / "b", folder / "c");
  CHECK_FALSE(io::exists(folder / "b"));
  io::remove_file(folder / "c");
  create(folder / "one", "1");
  create(folder / "two", "2");
  if (io::exchange(folder / "one", folder / "two")) CHECK(io::read_file(folder / "one") == "2");
  CHECK(io::free_bytes(folder.path) > 0);
  CHECK_FALSE(io::read_file("/proc/self/stat").empty());
  io::remove_tree(folder / "absent");
}

TEST_CASE("removing a tree does not follow links out of it", "[io]") {
  const TempFolder folder;
  io::make_directories(folder / "keep");
  create(folder / "keep/file", "precious");
  io::make_directories(folder / "gone/deep");
  create(folder / "gone/deep/file", "x");
  REQUIRE(::symlink((folder / "keep").c_str(), (folder / "gone/link").c_str()) == 0);
  io::remove_tree(folder / "gone");
  CHECK_FALSE(io::exists(folder / "gone"));
  CHECK(io::read_file(folder / "keep/file") == "precious");
}

TEST_CASE("errors contain call, path and errno", "[io]") {
  const TempFolder folder;
  try {
    io::read_file(folder / "absent");
    FAIL("no error");
  } catch (const io::IoError& error) {
    CHECK(error.code() == ExitCode::no_input);
    CHECK(error.error_number() == ENOENT);
    CHECK(error.what() == "cannot open " + folder.path + "/absent: No such file or directory (ENOENT)");
  }
  CHECK_THROWS_WITH(io::read_file(folder.path), Contains("it is a folder"));
  CHECK_THROWS_WITH(io::read_file("/dev/zero"), Contains("device"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK_THROWS_WITH(io::read_file(folder / "pipe"), Contains("pipe"));
  CHECK_THROWS_WITH(io::MappedFile(folder / "pipe"), Contains("pipe"));
  create(folder / "long", std::string(100, 'x'));
  CHECK_THROWS_WITH(io::read_file(folder / "long", 99), Contains("100 bytes, at most 99"));
  REQUIRE(::symlink((folder / "long").c_str(), (folder / "link").c_str()) == 0);
  CHECK((io::is_link(folder / "link") && !io::is_link(folder / "long")));
  CHECK(io::MappedFile(folder / "link").size() == 100);
  CHECK_THROWS_WITH(io::MappedFile(folder / "link", false), Contains("symbolic link"));
  CHECK_THROWS_WITH(create(folder / "link", ""), Contains("EEXIST"));
  CHECK_THROWS_WITH(io::OutputFile(folder / "link", io::OutputFile::Mode::append), Contains("ELOOP"));
}

TEST_CASE("an atomic write leaves the old or the new file, whatever fails", "[io]") {
  const TempFolder folder;
  const std::string path = folder / "state.json", before(1000, 'a'), after(3000, 'b');
  for (const char* error : {"ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "EDQUOT"}) {
    io::write_file_atomic(path, before);
    int failures = 0;
    for (int n = 1; n < 100; ++n, ++failures) {
      const TempVariable fault("SLUICE_IOFAIL", fmt::format("{}:{}", n, error));
      try {
        io::write_file_atomic(path, after);
        break;
      } catch (const io::IoError& failure) {
        CHECK_THAT(failure.what(), Contains(error) && Contains(folder.path));
      }
      const std::string content = io::read_file(path);
      CHECK((content == before || content == after));
    }
    CHECK(failures == 5);  // create, write, fsync, rename, fsync of the folder
    CHECK(io::read_file(path) == after);
    CHECK(io::list_directory(folder.path).size() == 1);
  }
}

TEST_CASE("an atomic write leaves the old or the new file, wherever the process is killed", "[io]") {
  const TempFolder folder;
  const std::string path = folder / "state.json", before(1000, 'a'), after(3000, 'b');
  for (const char* kind : {"", ":torn"}) {
    io::write_file_atomic(path, before);
    int kills = 0;
    for (int n = 1; n < 100; ++n, ++kills) {
      const int status = in_child([&] {
        const TempVariable fault("SLUICE_CRASH", fmt::format("{}{}", n, kind));
        io::write_file_atomic(path, after);
      });
      const std::string content = io::read_file(path);
      CHECK((content == before || content == after));
      if (!WIFSIGNALED(status)) break;
      CHECK(WTERMSIG(status) == SIGKILL);
    }
    CHECK(kills >= 5);  // a temporary file left by a kill is one operation more
    CHECK(io::read_file(path) == after);
    CHECK(io::list_directory(folder.path).size() == 1);
  }
}

TEST_CASE("a torn write leaves half of the bytes", "[io]") {
  const TempFolder folder;
  in_child([&] {
    const TempVariable fault("SLUICE_CRASH", "2:torn");
    create(folder / "half", std::string(1000, 'x'));
  });
  CHECK(io::file_size(folder / "half") == 500);
}

TEST_CASE("a sticky fault persists", "[io]") {
  const TempFolder folder;
  const TempVariable fault("SLUICE_IOFAIL", "2:ENOSPC:sticky");
  CHECK_NOTHROW(io::OutputFile(folder / "a", io::OutputFile::Mode::create_new));
  for (int i = 0; i < 3; ++i)
    CHECK_THROWS_WITH(io::make_directories(folder / "b"), Contains("No space left on device (ENOSPC)"));
  ::unsetenv("SLUICE_IOFAIL");
}

TEST_CASE("an unreadable fault specification is an error", "[io]") {
  const TempFolder folder;
  for (const char* text :
       {"x", "0:EIO", "-1:EIO", "1", "1:EWHAT", "1:EIO:often", "1:EIO:", "1:EIO:sticky:x"}) {
    const TempVariable fault("SLUICE_IOFAIL", text);
    CHECK_THROWS_WITH(io::make_directories(folder / "a"), Contains("SLUICE_IOFAIL=") && Contains("ERRNO"));
  }
}

TEST_CASE("a write beyond the size limit is an error with the file's name", "[io]") {
  const TempFolder folder;
  const int status = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      create(folder / "big", std::string(10000, 'x'));
    } catch (const io::IoError& error) {
      if (error.error_number() == EFBIG) ::_exit(27);
    }
  });
  CHECK(WEXITSTATUS(status) == 27);
}

TEST_CASE("writes and reads go past 2^31 bytes", "[io][.slow]") {
  const TempFolder folder;
  const int64_t bytes = (int64_t{1} << 31) + 4097;
  std::string content(static_cast<size_t>(bytes), 'x');
  content.back() = 'y';
  create(folder / "big", content);
  CHECK(io::file_size(folder / "big") == bytes);
  CHECK((io::read_file(folder / "big", int64_t{1} << 32) == content));
}

TEST_CASE("a sparse file past 2^32 bytes is mapped at its true size", "[io]") {
  const TempFolder folder;
  const int64_t bytes = (int64_t{5} << 30) + 1;
  create(folder / "sparse", "");
  REQUIRE(::truncate((folder / "sparse").c_str(), bytes) == 0);
  io::MappedFile file(folder / "sparse");
  CHECK(file.size() == bytes);
  CHECK(file.data()[bytes - 1] == 0);
  io::MappedFile moved = std::move(file);
  CHECK(moved.data()[int64_t{1} << 32] == 0);
  CHECK(file.data() == nullptr);
}

TEST_CASE("a fault can be limited to one rank", "[io]") {
  const TempFolder folder;
  {
    const TempVariable fault("SLUICE_IOFAIL", "3:1:EIO");  // this process is rank 0
    CHECK_NOTHROW(io::make_directories(folder / "a"));
  }
  const TempVariable fault("SLUICE_IOFAIL", "0:1:EIO");
  CHECK_THROWS_WITH(io::make_directories(folder / "b"), Contains("(EIO)"));
}

TEST_CASE("every mutating operation can be traced", "[io]") {
  const TempFolder folder;
  {
    const TempVariable fault("SLUICE_IOTRACE", folder / "trace");
    io::write_file_atomic(folder / "a", "text");
  }
  const std::string trace = io::read_file(folder / "trace");
  size_t at = 0;
  for (const char* action : {"create", "write", "sync", "rename", "sync folder"}) {
    at = trace.find(action, at);
    CHECK(at != std::string::npos);
  }
  CHECK(std::count(trace.begin(), trace.end(), '\n') == 5);
}
