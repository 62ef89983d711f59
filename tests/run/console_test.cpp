#include "run/console.h"

#include <catch2/catch.hpp>
#include <csignal>

#include "data/temporary.h"
#include "run/run_folder.h"
#include "run/signals.h"

namespace sluice {
namespace {

Progress some_progress() {
  Progress p;
  p.step = 1200;
  p.max_steps = 19073;
  p.loss = 3.4119;
  p.grad_norm = 0.41;
  p.lr = 6e-4;
  p.tokens_per_second = 1.42e6;
  p.seconds_left = 3 * 3600 + 21 * 60;
  return p;
}

/// Terminal columns of a UTF-8 string without escapes.
int64_t columns(const std::string& text) {
  int64_t n = 0;
  for (const char c : text) n += (static_cast<uint8_t>(c) & 0xC0) != 0x80;
  return n;
}

}  // namespace

TEST_CASE("counts, durations and rates are short", "[console]") {
  CHECK(format_count(950) == "950");
  CHECK(format_count(12345) == "12.3k");
  CHECK(format_count(999600) == "1.00M");
  CHECK(format_count(1.42e6) == "1.42M");
  CHECK(format_count(1.7206e9) == "1.72B");
  CHECK(format_duration(45.2) == "45s");
  CHECK(format_duration(125) == "2m05s");
  CHECK(format_duration(12060) == "3h21m");
  CHECK(format_duration(200000) == "2d07h");
  CHECK(format_exponent(6e-4) == "6.0e-4");
  CHECK(format_exponent(0) == "0");
  CHECK(format_exponent(8.6e18) == "8.6e18");
}

TEST_CASE("the log line is the documented one", "[console]") {
  Terminal lines;
  CHECK(format_progress(some_progress(), lines) ==
        "step   1200/19073   6.3%  loss 3.412  gn 0.41  lr 6.0e-4  1.42M tok/s  ETA 3h21m");
  Progress with_losses = some_progress();
  with_losses.losses = {{"load", 1.306, 2}, {"heads", 0.25}};
  CHECK_THAT(format_progress(with_losses, lines),
             Catch::EndsWith("1.42M tok/s  load 1.31  heads 0.250  ETA 3h21m"));
  Terminal bar;
  bar.bar = bar.unicode = true;
  bar.width = 120;
  const std::string text = format_progress(some_progress(), bar);
  CHECK_THAT(text, Catch::Contains("6.3%  \u2588\u2591\u2591"));
  CHECK_THAT(text, Catch::Contains("loss 3.412  gn 0.41  lr 6.0e-4  1.42M tok/s  ETA 3h21m"));
}

TEST_CASE("the bar never wraps, in a terminal of any width", "[console]") {
  Terminal terminal;
  terminal.bar = terminal.unicode = true;
  for (terminal.width = 30; terminal.width < 200; ++terminal.width)
    CHECK(columns(format_progress(some_progress(), terminal)) < terminal.width);
}

TEST_CASE("without a terminal, or under a launcher, there is no bar and no carriage return", "[console]") {
  // The test's own stdout may be a terminal or not; a launcher decides either way.
  setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  CHECK_FALSE(Terminal::detect(ConsoleMode::automatic).bar);
  unsetenv("OMPI_COMM_WORLD_SIZE");
  CHECK_FALSE(Terminal::detect(ConsoleMode::lines).bar);
  CHECK(Terminal::detect(ConsoleMode::bar).bar);
  setenv("COLUMNS", "77", 1);
  CHECK(Terminal::detect(ConsoleMode::automatic).width == 77);
  unsetenv("COLUMNS");

  test::TemporaryFolder folder;
  Console console(ConsoleMode::none, Terminal{});
  console.log_to(folder / "console.log");
  console.line("hello");
  console.progress(some_progress());
  const std::string log = io::read_file(folder / "console.log");
  CHECK_THAT(log, Catch::Contains("hello\nstep "));
  CHECK(log.find('\r') == std::string::npos);
}

TEST_CASE("the first stop signal is remembered by name", "[signals]") {
  const StopSignals signals;
  CHECK_FALSE(signals.requested());
  std::raise(SIGUSR2);
  CHECK(signals.requested());
  std::raise(SIGTERM);  // ignored, because the save is in progress
  CHECK(std::string(signals.name()) == "SIGUSR2");
}

TEST_CASE("a failed start leaves the folders of other runs alone", "[run_folder]") {
  test::TemporaryFolder folder;
  {
    RunFolder first(folder / "new/runs/a");  // creates all three
    RunFolder other(folder / "new/runs/b");
    other.write("config.yaml", "x");
    other.keep();
  }
  CHECK_FALSE(io::exists(folder / "new/runs/a"));
  CHECK(io::read_file(folder / "new/runs/b/config.yaml") == "x");
  { RunFolder(folder / "newer/runs/a"); }
  CHECK_FALSE(io::exists(folder / "newer"));
}

TEST_CASE("only one run at a time owns a run folder", "[run_folder]") {
  test::TemporaryFolder folder;
  {
    const RunFolder first(folder / "a/b");
    test::expect_error(ExitCode::cannot_create, {folder / "a/b", "in use", "pid "},
                       [&] { RunFolder(folder / "a/b"); });
  }
  const RunFolder again(folder / "a/b");
  again.write_status({{"state", "running"}});
  CHECK_THAT(io::read_file(again.file("status.json")), Catch::Contains("\"heartbeat\""));
}

}  // namespace sluice
