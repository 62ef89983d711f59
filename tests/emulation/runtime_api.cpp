// The rest of the fake CUDA runtime: the device and its properties, errors, streams, events.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake_runtime.h"

namespace emu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

/// SLUICE_EMULATED_ARCH: 80, 90, ..., as it is when it is asked for.
int architecture() {
  const char* text = std::getenv("SLUICE_EMULATED_ARCH");
  return text && *text ? std::atoi(text) : 90;
}

/// Few, and not a power of two, so that the blocks of a persistent kernel get several and unequal numbers of
/// tiles.
constexpr int kMultiprocessors = 5;

/// Small, so that what empties it costs little.
constexpr int kCacheBytes = 64 << 10;

thread_local double spent = 0;

double now() {
  return spent + std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void spend(double seconds) { spent += seconds; }

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace emu

using emu::result;

extern "C" {

// ---- errors

cudaError_t cudaGetLastError() {
  const cudaError_t error = emu::last_error;
  emu::last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return emu::last_error; }

const char* cudaGetErrorName(cudaError_t error) {
#define EMU_NAME(e) \
  case e:           \
    return #e
  switch (static_cast<int>(error)) {
    EMU_NAME(cudaSuccess);
    EMU_NAME(cudaErrorInvalidValue);
    EMU_NAME(cudaErrorMemoryAllocation);
    EMU_NAME(cudaErrorInvalidConfiguration);
    EMU_NAME(cudaErrorInvalidDevice);
    EMU_NAME(cudaErrorInvalidPitchValue);
    EMU_NAME(cudaErrorInvalidResourceHandle);
    EMU_NAME(cudaErrorIllegalAddress);
    EMU_NAME(cudaErrorIllegalState);
    EMU_NAME(cudaErrorNotReady);
    EMU_NAME(cudaErrorNotSupported);
    EMU_NAME(cudaErrorLaunchFailure);
    EMU_NAME(cudaErrorStreamCaptureUnsupported);
    EMU_NAME(cudaErrorStreamCaptureInvalidated);
    EMU_NAME(cudaErrorStreamCaptureUnjoined);
    EMU_NAME(cudaErrorStreamCaptureIsolation);
    EMU_NAME(cudaErrorStreamCaptureImplicit);
    EMU_NAME(cudaErrorCapturedEvent);
    default:
      return "an error that the emulator does not know";
  }
#undef EMU_NAME
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (static_cast<int>(error)) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorIllegalAddress:
      return "memory after the end of an allocation was written";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capture was not joined to the original stream";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing stream";
    default:
      return "invalid argument";
  }
}

// ---- the device

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return result(cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return result(cudaSuccess);
}
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return result(cudaSuccess);
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return result(cudaSuccess);
}
cudaError_t cudaDeviceSynchronize() {
  if (emu::forbidden_in_capture()) return result(cudaErrorStreamCaptureUnsupported);
  emu::finish_own_streams();
  return result(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!value) return result(cudaErrorInvalidValue);
  if (device != 0) return result(cudaErrorInvalidDevice);
  switch (static_cast<int>(attribute)) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = emu::architecture() / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = emu::architecture() % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = emu::kMultiprocessors;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = 65536;
      break;
    case cudaDevAttrL2CacheSize:
      *value = emu::kCacheBytes;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 0;
      break;
    default:
      return result(cudaErrorInvalidValue);
  }
  return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return result(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "emulated GPU");
  size_t free_bytes = 0;
  cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
  properties->major = emu::architecture() / 10;
  properties->minor = emu::architecture() % 10;
  properties->multiProcessorCount = emu::kMultiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->regsPerBlock = 65536;
  properties->l2CacheSize = emu::kCacheBytes;
  return result(cudaSuccess);
}

// ---- streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = emu::new_stream();
  return result(cudaSuccess);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return result(cudaSuccess);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  emu::end_stream(stream);
  return result(cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (emu::Capture* capture = emu::capture_of(stream)) {
    capture->invalid = true;
    return result(cudaErrorStreamCaptureUnsupported);
  }
  emu::finish(stream, emu::enqueued(stream));
  return result(cudaSuccess);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return !emu::capture_of(stream) && !emu::advance(stream, emu::enqueued(stream))
             ? result(cudaErrorNotReady)
             : cudaStreamSynchronize(stream);
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->timing = !(flags & cudaEventDisableTiming);
  return result(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return result(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!event) return result(cudaErrorInvalidResourceHandle);
  event->capture = emu::capture_of(stream);
  event->stream = stream;
  event->recorded = true;
  event->at = emu::enqueued(stream);
  if (event->capture)
    event->work = stream->work;
  else
    event->seconds = emu::now();
  return result(cudaSuccess);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!event) return result(cudaErrorInvalidResourceHandle);
  if (!event->capture && event->recorded) emu::finish(event->stream, event->at);
  return result(event->capture ? cudaErrorCapturedEvent : cudaSuccess);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event && !event->capture && event->recorded && !emu::advance(event->stream, event->at))
    return result(cudaErrorNotReady);
  return cudaEventSynchronize(event);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (!milliseconds || !begin || !end) return result(cudaErrorInvalidResourceHandle);
  if (begin->capture || end->capture) return result(cudaErrorCapturedEvent);
  if (!begin->timing || !end->timing || !begin->recorded || !end->recorded)
    return result(cudaErrorInvalidResourceHandle);
  *milliseconds = static_cast<float>((end->seconds - begin->seconds) * 1e3);
  return result(cudaSuccess);
}

}  // extern "C"
