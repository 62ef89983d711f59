// The report of a failed launch: kernel, block, thread, seed, error and source location.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "machine.h"

namespace emu {
namespace {

std::string formatted(const char* format, va_list arguments) {
  char text[2048];
  std::vsnprintf(text, sizeof text, format, arguments);
  return text;
}

std::string triple(uint3 v) {
  char text[64];
  std::snprintf(text, sizeof text, "(%u,%u,%u)", v.x, v.y, v.z);
  return text;
}

void keep_first_error(Launch& launch, const std::string& text) {
  const std::lock_guard lock(launch.mutex);
  if (launch.error.empty()) launch.error = text;
  launch.stopped = true;
}

/// Outside of a kernel: throws.
void record_failure(const std::string& what) {
  if (!g_cur) throw LaunchError(what);
  Thread& t = self();
  Launch& launch = *t.group->launch;
  keep_first_error(launch, std::string("kernel ") + launch.params.name + ", block " + triple(t.bid) +
                               ", thread " + triple(t.tid) + ", seed " + std::to_string(launch.seed) + ": " +
                               what);
}

}  // namespace

std::string where(Site site) {
  return std::string(site.file ? site.file : "?") + ":" + std::to_string(site.line);
}

// The kernel's stack is abandoned, so no object that owns memory may be on it.
void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_failure(formatted(format, arguments));
  va_end(arguments);
  abandon_group(*self().group);
}

void fail_at(Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_failure(formatted(format, arguments) + ", at " + where(site));
  va_end(arguments);
  abandon_group(*self().group);
}

void report_deadlock(Group& g) {
  struct Waiting {
    unsigned threads = 0;
    std::string first;
  };
  std::map<std::string, Waiting> kinds;
  for (unsigned r = 0; r < g.block_count; ++r) {
    const Block& b = *g.blocks[r];
    for (unsigned i = 0; i < b.thread_count; ++i) {
      const Thread& t = b.threads[i];
      const std::string kind = t.state == ThreadState::done ? "exited"
                                                            : std::string("waiting in ") + t.waiting_for +
                                                                  " at " + where(t.waiting_at);
      Waiting& w = kinds[kind];
      if (w.threads++ == 0)
        w.first = "thread " + triple(t.tid) + (g.block_count > 1 ? " of block " + triple(b.id) : "");
    }
  }
  Launch& launch = *g.launch;
  std::string text = std::string("kernel ") + launch.params.name + ", block " + triple(g.blocks[0]->id) +
                     ", seed " + std::to_string(launch.seed) + ": deadlock: no thread can run";
  for (const auto& [kind, waiting] : kinds)
    text += "\n    " + std::to_string(waiting.threads) + " thread(s) " + kind + ", first " + waiting.first;
  keep_first_error(launch, text);
}

}  // namespace emu
