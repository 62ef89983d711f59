#pragma once
// What a run writes: checkpoints and logs.
#include "config/enum_names.h"

namespace sluice {

enum class ConsoleMode : uint8_t { automatic, bar, lines, none };

SLUICE_ENUM_NAMES(ConsoleMode, "auto", "bar", "lines", "none");

struct CheckpointConfig {
  int64_t every_steps = 0;
  double every_minutes = 15.0;
  int64_t keep_last = 2;
  int64_t keep_every_steps = 0;
  bool async = true;
  double timeout_seconds = 600.0;

  template <class V>
  void fields(V& f) {
    f("every_steps", every_steps, "steps between checkpoints; 0: only by time and at the end");
    f("every_minutes", every_minutes, "minutes between checkpoints; 0: only by steps and at the end");
    f("keep_last", keep_last,
      "number of checkpoints to keep; older ones are removed once a newer one is complete");
    f("keep_every_steps", keep_every_steps, "checkpoints at multiples of this are never removed; 0: none");
    f("async", async, "write in the background while training continues");
    f("timeout_seconds", timeout_seconds,
      "a save fails if it waits longer than this for the files of another rank");
  }
};

struct LogConfig {
  int64_t every_steps = 10;
  bool tensorboard = true;
  int64_t trace_step = 0;
  int64_t bits = 0;
  ConsoleMode console = ConsoleMode::automatic;

  template <class V>
  void fields(V& f) {
    f("every_steps", every_steps, "steps between entries in metrics.jsonl, TensorBoard and the console");
    f("tensorboard", tensorboard, "write TensorBoard event files to RUN/tb");
    f("trace_step", trace_step,
      "step whose ops are traced to RUN/trace.json, for chrome://tracing or Perfetto; 0: none");
    f("bits", bits,
      "RUN/bits.log: the exact bits of every step's loss and gradient norm, and every this many steps a hash "
      "of weights and moments; 0: off");
    f("console", console, "bar: one rewritten line; auto: bar in a terminal outside a launcher, else lines");
  }
};

}  // namespace sluice
