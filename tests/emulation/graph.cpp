// Stream captures and graphs: while a stream is captured, its launches, copies and fills are recorded with
// their arguments instead of being performed; launching the graph performs them in that order. Streams that
// wait for a captured event join the capture and must be joined back before it ends.
#include <memory>

#include "fake_runtime.h"

struct CUgraph_st {
  std::vector<std::function<void()>> nodes;
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> nodes;
};

namespace emu {
namespace {

/// The capture started by this host thread, its stream, and the streams that joined it.
struct Recording {
  std::unique_ptr<Capture> capture;
  CUstream_st* origin = nullptr;
  std::vector<CUstream_st*> joined;
};
Recording& recording() {
  static thread_local Recording r;
  return r;
}

unsigned long long next_id() {
  static unsigned long long id = 0;
  return ++id;
}

}  // namespace

Capture* capture_of(cudaStream_t stream) { return stream ? stream->capture : nullptr; }

bool forbidden_in_capture() {
  Capture* capture = recording().capture.get();
  if (capture) capture->invalid = true;
  return capture != nullptr;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  Capture* capture = capture_of(stream);
  if (!capture) {
    if (!stream && recording().capture) {  // the legacy stream would wait for all others
      recording().capture->invalid = true;
      return cudaErrorStreamCaptureImplicit;
    }
    if (late() && stream) {
      enqueue_pending(stream, [work = std::move(work)] {
        work();
        return true;
      });
      return cudaSuccess;
    }
    finish(stream, enqueued(stream));
    work();
    return cudaSuccess;
  }
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  capture->nodes.push_back(std::move(work));
  ++stream->work;
  return cudaSuccess;
}

bool record_launch(const LaunchParams& params, const KernelCall& call) {
  CUstream_st* stream = params.stream ? params.stream : recording().origin;
  if (!capture_of(stream) && !(late() && stream)) {
    finish(stream, enqueued(stream));
    return false;
  }
  const std::shared_ptr<KernelCall> kept = call.clone();
  const std::string name = params.name;
  const cudaError_t error = enqueue(stream, [params, kept, name] {
    LaunchParams p = params;
    p.name = name.c_str();
    run_launch(p, *kept);
  });
  if (error) throw LaunchError("kernel " + name + ": " + cudaGetErrorName(error));
  return true;
}

}  // namespace emu

using emu::result;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  emu::Recording& r = emu::recording();
  if (!stream) return result(cudaErrorStreamCaptureUnsupported);
  if (r.capture || stream->capture) return result(cudaErrorIllegalState);
  r.capture = std::make_unique<emu::Capture>();
  r.capture->id = emu::next_id();
  r.origin = stream;
  stream->capture = r.capture.get();
  return result(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  emu::Recording& r = emu::recording();
  if (graph) *graph = nullptr;
  if (!graph || !stream) return result(cudaErrorInvalidValue);
  if (!r.capture || r.origin != stream) return result(cudaErrorIllegalState);
  bool unjoined = false;
  for (CUstream_st* other : r.joined) {
    unjoined |= other->joined < other->work;
    other->capture = nullptr;
  }
  stream->capture = nullptr;
  const std::unique_ptr<emu::Capture> capture = std::move(r.capture);
  r.origin = nullptr;
  r.joined.clear();
  if (capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
  if (unjoined) return result(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{std::move(capture->nodes)};
  return result(cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (!status) return result(cudaErrorInvalidValue);
  const emu::Capture* capture = emu::capture_of(stream);
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return result(cudaSuccess);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return result(cudaSuccess); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!event) return result(cudaErrorInvalidResourceHandle);
  emu::Recording& r = emu::recording();
  emu::Capture* of_event = event->capture;
  emu::Capture* of_stream = emu::capture_of(stream);
  if (of_event && of_event != r.capture.get())
    return result(cudaErrorInvalidValue);  // of a capture that has ended
  if (of_stream && !of_event) {
    of_stream->invalid = true;
    return result(cudaErrorStreamCaptureIsolation);
  }
  if (!of_event) {
    if (!event->recorded) return result(cudaSuccess);
    if (emu::late() && stream)
      emu::enqueue_pending(stream,
                           [other = event->stream, at = event->at] { return emu::advance(other, at); });
    else
      emu::finish(event->stream, event->at);
    return result(cudaSuccess);
  }
  if (!of_stream) {
    stream->capture = of_event;
    stream->work = stream->joined = 0;
    r.joined.push_back(stream);
  } else if (event->stream != stream) {
    event->stream->joined = std::max(event->stream->joined, event->work);
  }
  return result(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (!exec || !graph) return result(cudaErrorInvalidValue);
  *exec = new CUgraphExec_st{graph->nodes};
  return result(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (!exec) return result(cudaErrorInvalidValue);
  return result(emu::enqueue(stream, [nodes = exec->nodes] {
    for (const auto& node : nodes) node();
  }));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (!graph || !count || nodes) return result(cudaErrorInvalidValue);  // their number only
  *count = graph->nodes.size();
  return result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return result(cudaSuccess);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return result(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return result(emu::enqueue(stream, [=] { function(data); }));
}

}  // extern "C"
