#pragma once
// Devices, and what of them core needs: memory, copies, waiting. In a CPU build everything that names a GPU
// is an error by name; in a CUDA build it goes to cuda/device.cu (core/cuda_backend.h).
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sluice {

enum class Device : uint8_t { cpu, cuda };
constexpr const char* device_name(Device d) { return d == Device::cpu ? "cpu" : "cuda"; }

struct DeviceInfo {
  std::string name;
  int64_t memory_bytes = 0, free_bytes = 0;
  int compute_capability = 0;  // times ten: 90
  int multiprocessors = 0;
  bool emulated =
      false;  // tests/emulation in the place of a card: exact, and far too slow to be chosen unasked
};

/// Whether this program holds a CUDA backend at all.
bool built_with_cuda();
/// The GPUs this process sees; empty in a CPU build, without a driver or without a card.
std::vector<DeviceInfo> cuda_devices();

/// This thread, and what it begins, computes on the index-th of them, modulo their number: several ranks of
/// one machine share them. Before anything is allocated; nothing without one.
void choose_cuda_device(int index);
/// The same for a thread that begins later: what was chosen is the process's, but CUDA asks every thread.
void use_chosen_cuda_device();
/// The one that was chosen; the first otherwise.
int chosen_cuda_device();

struct Context;
struct Tensor;

/// dst = src: equal shape and dtype, any two devices, in order with the ops of ctx. Host memory must live,
/// and stay as it is, until synchronize(). Nothing in a dry run.
void copy(Context& ctx, const Tensor& dst, const Tensor& src);

/// Waits for everything that ops of ctx have begun. Throws what kernels on a GPU reported meanwhile:
/// Error(data) for tokens, targets and positions outside their tables. On a CPU ops throw by themselves and
/// this does nothing.
void synchronize(Context& ctx);

/// Brings a tensor to host memory of its size, or the other way round, through pinned buffers: for
/// checkpoints, initial values and evaluation. Waits; the host memory is free afterwards. Nothing in a dry
/// run.
void read_tensor(Context& ctx, void* host, const Tensor& t);
void write_tensor(Context& ctx, const Tensor& t, const void* host);

/// As copy(), on the context's copy stream, beside its ops: for the next step's input. await_prefetch makes
/// later ops of ctx wait for all of them.
void prefetch(Context& ctx, const Tensor& dst, const Tensor& src);
void await_prefetch(Context& ctx);

/// A point in the ops of one context for which those of another wait: of two streams of a GPU. On a CPU an op
/// is done when it returns, and nothing waits.
class Mark {
 public:
  Mark();
  ~Mark();
  Mark(Mark&& other) noexcept;
  Mark& operator=(Mark&& other) noexcept;

  /// Here: after everything that ctx has begun. Moves a mark that was set before.
  void set(Context& ctx);
  /// Later ops of ctx begin when what was before the mark is done; at once if it was never set.
  void await(Context& ctx) const;

  struct Impl {
    virtual ~Impl() = default;
    virtual void set(Context& ctx) = 0;
    virtual void await(Context& ctx) = 0;
  };

 private:
  std::unique_ptr<Impl> impl_;
};

/// A sequence of ops recorded once and replayed with one call (a CUDA graph). Only on a GPU.
class Graph {
 public:
  Graph();
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  /// Records what `ops` enqueues on ctx; nothing is computed. Tensors and scalars are those of now.
  void record(Context& ctx, const std::function<void()>& ops);
  bool recorded() const { return impl_ != nullptr; }
  void launch(Context& ctx);

  struct Impl {
    virtual ~Impl() = default;
    virtual void launch(Context& ctx) = 0;
  };

 private:
  std::unique_ptr<Impl> impl_;
};

/// Called by train with its configuration's choice: cuda where this program has a backend and sees a card.
Device automatic_device();

/// The one element of a (1) f64 or f32 tensor, wherever it is: waits. 0 in a dry run.
double read_scalar(Context& ctx, const Tensor& t);

}  // namespace sluice
