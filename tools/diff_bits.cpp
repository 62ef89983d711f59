// sluice checkpoint diff-bits: the first step at which two runs differ.
#include <spdlog/fmt/fmt.h>

#include <memory>
#include <utility>

#include "checkpoint/state_hash.h"
#include "commands.h"
#include "core/error.h"
#include "core/io.h"

namespace sluice {
namespace {

std::string bits_file(const std::string& path) {
  if (!io::is_directory(path)) return path;
  if (!io::exists(path + "/bits.log"))
    fail(ExitCode::no_input, "{} has no bits.log; train with log.bits=N", path);
  return path + "/bits.log";
}

int diff_bits(const std::string& a, const std::string& b) {
  const BitsComparison c = compare_bits(bits_file(a), bits_file(b));
  if (c.step >= 0) {
    fmt::print("first difference at step {}: {}\n", c.step, c.difference);
    return 1;
  }
  fmt::print("equal bit for bit: loss and gradient norm of {} steps, weights and moments at {} of them\n",
             c.steps, c.states);
  if (c.last_a != c.last_b)
    fmt::print("the first ends at step {}, the second at step {}\n", c.last_a, c.last_b);
  return 0;
}

}  // namespace

void add_diff_bits_command(Command& checkpoint, int& exit_code) {
  const auto paths = std::make_shared<std::pair<std::string, std::string>>();
  Command* sub = checkpoint.add_subcommand(
      "diff-bits",
      "the first step at which two runs with log.bits differ, and the difference; exit code 1 if they do");
  sub->add_option("a", paths->first, "run folder, or its bits.log")->required()->type_name("RUN");
  sub->add_option("b", paths->second, "another")->required()->type_name("RUN");
  sub->callback([paths, &exit_code] { exit_code = diff_bits(paths->first, paths->second); });
}

}  // namespace sluice
