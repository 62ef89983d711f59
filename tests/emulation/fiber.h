#pragma once
// Fibers: a stack and the place where its code stands. One OS thread switches among many; a switch costs
// about 5 ns.
#include <cstddef>

#include "sanitizer.h"

namespace emu {

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // lowest usable byte; a guard page lies below
  size_t stack_size = 0;
  size_t color = 0;  // unused bytes at the top, see new_fiber
  void* asan_stack = nullptr;
  void* tsan_fiber = nullptr;
};

/// A fiber with a stack of 256 KiB that costs memory only where it is touched.
Fiber* new_fiber();
/// Makes the next switch to `fiber` call entry(), which must not return.
void prepare_fiber(Fiber& fiber, void (*entry)());
/// The stack that this OS thread runs on, to come back to.
void adopt_os_thread(Fiber& fiber);
/// Continues `to`. Returns when something switches back to `from`; never, where `leaving` says that nothing
/// will.
void switch_fiber(Fiber& from, Fiber& to, bool leaving);
/// The first thing that a new fiber's entry does.
void arrived_on_new_fiber();
/// Forgets what ran on the fiber, whose frames were abandoned, and releases it to who acquires `key`.
void reset_fiber(Fiber& fiber, const void* key);

}  // namespace emu
