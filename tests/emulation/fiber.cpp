#include "fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "array.h"

#ifndef __x86_64__
#error "the emulator's context switch is written for x86-64"
#endif

// Saves the registers that a function must preserve on the old stack, and returns on the new one.
extern "C" void emu_switch_stack(void** save_stack_pointer, void* load_stack_pointer);
asm(R"(
.text
.p2align 4
.globl emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq  %rsp, (%rdi)
  movq  %rsi, %rsp
  popq  %r15
  popq  %r14
  popq  %r13
  popq  %r12
  popq  %rbp
  popq  %rbx
  ret
.size emu_switch_stack, .-emu_switch_stack
)");

namespace emu {
namespace {

constexpr size_t kStackSize = 256 << 10;
constexpr size_t kGuardSize = 4096;
constexpr int kPreservedRegisters = 6;

}  // namespace

void* arena_alloc(size_t size) {
  constexpr size_t kChunk = 1 << 20;
  static thread_local char* next;
  static thread_local size_t left;
  size = (size + 63) & ~size_t{63};
  if (size > left) {
    left = size > kChunk ? size : kChunk;
    void* chunk = mmap(nullptr, left, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (chunk == MAP_FAILED) std::abort();
    next = static_cast<char*>(chunk);
  }
  void* result = next;
  next += size, left -= size;
  return result;
}

Fiber* new_fiber() {
  void* memory = mmap(nullptr, kStackSize + kGuardSize, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kGuardSize, PROT_NONE);
  Fiber* fiber = new Fiber;
  fiber->stack = static_cast<char*>(memory) + kGuardSize;
  fiber->stack_size = kStackSize;
  // Stacks that all began at the same place of a page would fight for the same few cache sets.
  static thread_local unsigned count;
  fiber->color = 64 * (count++ * 21 % 64);
#if EMU_TSAN
  fiber->tsan_fiber = __tsan_create_fiber(0);
#endif
  return fiber;
}

void prepare_fiber(Fiber& fiber, void (*entry)()) {
  san::allow(fiber.stack, fiber.stack_size);
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_size - fiber.color);
  *--top = nullptr;  // where entry would return to: ends a backtrace, and aligns the stack as a call does
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kPreservedRegisters; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.asan_stack = nullptr;
}

void adopt_os_thread(Fiber& fiber) {
  pthread_attr_t attributes;
  void* address = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &address, &fiber.stack_size);
  pthread_attr_destroy(&attributes);
  fiber.stack = static_cast<char*>(address);
#if EMU_TSAN
  fiber.tsan_fiber = __tsan_get_current_fiber();
#endif
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool leaving) {
#if EMU_ASAN
  __sanitizer_start_switch_fiber(leaving ? nullptr : &from.asan_stack, to.stack, to.stack_size);
#endif
#if EMU_TSAN
  constexpr unsigned kNoSynchronisation = 1;
  __tsan_switch_to_fiber(to.tsan_fiber, kNoSynchronisation);
#endif
  emu_switch_stack(&from.stack_pointer, to.stack_pointer);
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(from.asan_stack, nullptr, nullptr);
#endif
}

void arrived_on_new_fiber() {
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void reset_fiber([[maybe_unused]] Fiber& fiber, [[maybe_unused]] const void* key) {
#if EMU_TSAN
  void* here = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.tsan_fiber, 1);
  san::release(key);
  __tsan_switch_to_fiber(here, 1);
  __tsan_destroy_fiber(fiber.tsan_fiber);
  fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
}

}  // namespace emu
