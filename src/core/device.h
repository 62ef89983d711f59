#pragma once
// Devices: memory, copies, waiting. In a CPU build every use of a GPU is an error that says so; in a CUDA
// build it is forwarded to cuda/device/device.cu (core/cuda_backend.h).
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
  int64_t memory_bytes = 0;
  int compute_capability = 0;  // times ten: 90
  int multiprocessors = 0;
  bool emulated =
      false;  // tests/emulation in place of a GPU: exact, but too slow to be selected automatically
};

/// Whether this program contains a CUDA backend.
bool built_with_cuda();
/// The GPUs visible to this process; empty in a CPU build, and without a driver or a GPU.
std::vector<DeviceInfo> cuda_devices();

/// Makes this thread and all later work of the process use the index-th visible GPU, modulo their number, so
/// that several ranks on one machine can share them. To be called before any allocation; does nothing without
/// a GPU.
void choose_cuda_device(int index);
/// Selects the chosen GPU in a thread started later: the choice belongs to the process, but CUDA keeps it per
/// thread.
void use_chosen_cuda_device();
/// The index of the chosen GPU; 0 if none was chosen.
int chosen_cuda_device();

struct Context;
struct Tensor;

/// dst = src for equal shape and dtype, between any two devices, in order with the ops of ctx. Host memory
/// must live and stay unchanged until synchronize(). Does nothing in a dry run.
void copy(Context& ctx, const Tensor& dst, const Tensor& src);

/// Waits for all ops of ctx. Throws the errors that GPU kernels have reported: Error(data) for tokens,
/// targets and positions out of range. On a CPU ops throw directly, and this does nothing.
void synchronize(Context& ctx);

/// Copies a tensor to host memory of its size, or back, through pinned buffers: for checkpoints, initial
/// values and evaluation. Waits, so the host memory may be reused at once. Does nothing in a dry run.
void read_tensor(Context& ctx, void* host, const Tensor& t);
void write_tensor(Context& ctx, const Tensor& t, const void* host);

/// Like copy(), but on the context's copy stream, concurrently with its ops: for the input of the next step.
/// await_prefetch makes later ops of ctx wait for all prefetches.
void prefetch(Context& ctx, const Tensor& dst, const Tensor& src);
void await_prefetch(Context& ctx);

/// A point in the ops of one context for which ops of another context wait (an event between two streams of a
/// GPU). On a CPU an op is complete when it returns, and nothing waits.
class Mark {
 public:
  Mark();
  ~Mark();
  Mark(Mark&& other) noexcept;
  Mark& operator=(Mark&& other) noexcept;

  /// Places the mark after all current ops of ctx; a mark that was set before moves.
  void set(Context& ctx);
  /// Makes later ops of ctx wait until the ops before the mark are complete; does nothing if it was never
  /// set.
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

  /// Records what `ops` enqueues on ctx, without computing anything. Replays use the tensors and scalars of
  /// the recording.
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

/// The device that train.device: auto selects: cuda if this program has a CUDA backend and a GPU is visible.
Device automatic_device();

/// The value of a (1) f64 or f32 tensor on any device; waits. 0 in a dry run.
double read_scalar(Context& ctx, const Tensor& t);

}  // namespace sluice
