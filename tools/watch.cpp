// sluice watch: what runs are doing, in one table that follows them.
#include "run/watch.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "commands.h"
#include "core/error.h"
#include "core/io.h"

namespace sluice {
namespace {

struct WatchOptions {
  std::vector<std::string> runs;
  bool once = false;
  double seconds = 2;
};

void watch(const WatchOptions& options) {
  std::vector<RunFollower> runs;
  for (const std::string& folder : options.runs) {
    if (!io::is_directory(folder)) fail(ExitCode::no_input, "{}: no such run folder", folder);
    runs.emplace_back(folder);
  }
  const bool follows = !options.once && isatty(STDOUT_FILENO);
  for (size_t drawn = 0;;) {
    bool all_ended = true;
    for (RunFollower& run : runs) {
      run.update();
      all_ended = all_ended && run.ended();
    }
    // The table is drawn over the last one.
    if (drawn > 0) fmt::print("\033[{}A", drawn);
    const std::vector<std::string> lines = watch_table(runs, Terminal::detect(ConsoleMode::automatic));
    for (const std::string& line : lines) fmt::print("{}{}\n", line, follows ? "\033[K" : "");
    std::fflush(stdout);
    drawn = lines.size();
    if (!follows || all_ended || std::ferror(stdout)) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(options.seconds));
  }
}

}  // namespace

void add_watch_command(Command& app, int&) {
  Command* command = app.add_subcommand("watch", "what runs are doing: a table that follows them");
  auto options = std::make_shared<WatchOptions>();
  command->add_option("run", options->runs, "run folders")->required()->type_name("RUN");
  command->add_flag("--once", options->once, "one look; so also where the output is no terminal");
  command->add_option("--every", options->seconds, "seconds between two looks (2)")
      ->between(0.1, 3600)
      ->type_name("SECONDS");
  command->footer(
      "loss: of the last logged step. gn: gradient norm. left: estimated time to the end. course: loss over "
      "the\n"
      "steps, from its lowest to its highest mean. Ends when every run has ended.\n\n"
      "Examples:\n"
      "  sluice watch runs/gated runs/baseline\n"
      "  sluice watch --once runs/*\n");
  command->callback([options] { watch(*options); });
}

}  // namespace sluice
