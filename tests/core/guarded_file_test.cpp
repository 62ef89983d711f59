#include "core/guarded_file.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <numeric>
#include <thread>
#include <vector>

#include "support/temp_folder.h"

namespace sluice {
namespace {

void write(const std::string& path, const std::string& bytes) {
  io::OutputFile file(path, io::OutputFile::Mode::create_new);
  file.write(bytes);
}

int64_t sum(const io::GuardedFile& file) {
  return std::accumulate(file.data(), file.data() + file.size(), int64_t{0});
}

void expect_lost(const io::GuardedFile& file, bool holds_zeros, const std::string& part) {
  try {
    file.check(holds_zeros);
    FAIL_CHECK("nothing was thrown");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::data);
    CHECK_THAT(error.what(), Catch::Contains(part) && Catch::Contains(file.path()));
  }
}

}  // namespace

TEST_CASE("truncation of a mapped file is an Error and not a SIGBUS", "[io]") {
  const TempFolder folder;
  constexpr int64_t kBytes = 1 << 20;
  write(folder / "x", std::string(kBytes, 1));
  write(folder / "whole", std::string(kBytes, 1));
  const io::GuardedFile file(folder / "x"), other(folder / "whole");
  CHECK(sum(file) == kBytes);
  CHECK_NOTHROW(file.check(true));
  REQUIRE(::truncate(file.path().c_str(), 5000) == 0);
  CHECK_NOTHROW(file.check());
  CHECK(file.data()[6000] == 0);  // the page with the new end: zeros without a signal
  CHECK_NOTHROW(file.check());
  expect_lost(file, true, "it had 1048576 bytes and now has 5000");
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) readers.emplace_back([&] { CHECK(sum(file) == 5000); });
  for (std::thread& reader : readers) reader.join();
  expect_lost(file, false, "was truncated while in use");
  CHECK(sum(other) == kBytes);
  CHECK_NOTHROW(other.check(true));
  // A new file of the same size, and one that was truncated and restored, are read as they are.
  write(folder / "y", std::string(kBytes, 2));
  const io::GuardedFile next(folder / "y");
  CHECK(sum(next) == 2 * kBytes);
  CHECK_NOTHROW(next.check(true));
}

TEST_CASE("replacing or removing a file does not affect its mapping", "[io]") {
  const TempFolder folder;
  write(folder / "x", std::string(100'000, 1));
  write(folder / "new", "short");
  const io::GuardedFile file(folder / "x");
  io::rename(folder / "new", folder / "x");
  CHECK(sum(file) == 100'000);
  CHECK_NOTHROW(file.check(true));
  io::remove_file(folder / "x");
  CHECK_NOTHROW(file.check(true));
}

TEST_CASE("SIGBUS elsewhere still ends the program", "[io]") {
  const TempFolder folder;
  write(folder / "x", std::string(100'000, 1));
  const int status = in_child([&] {
    const io::GuardedFile file(folder / "x");
    const io::MappedFile unguarded(folder / "x");
    if (::truncate(unguarded.path().c_str(), 0) != 0) ::_exit(2);
    volatile unsigned char byte = unguarded.data()[50'000];
    ::_exit(3 + byte);
  });
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGBUS);
}

TEST_CASE("SIGBUS that somebody sends still ends the program", "[io]") {
  const TempFolder folder;
  write(folder / "x", "1");
  const int status = in_child([&] {
    const io::GuardedFile file(folder / "x");
    ::_exit(::raise(SIGBUS));
  });
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGBUS);
}

}  // namespace sluice
