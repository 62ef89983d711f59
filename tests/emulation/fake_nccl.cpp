// NCCL for ranks that are threads of one process: messages of bytes, which move when both sides have reached
// them and a stream is queried for completion. Like the real NCCL it returns "in progress" for non-blocking
// communicators, refuses invalid calls, and cancels current operations when it is aborted.
#if __has_include(<nccl.h>)
#include "fake_nccl.h"

#include <nccl.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fake_runtime.h"

namespace {

struct Message {
  const void* data;
  size_t bytes;
  bool taken = false;
};

/// State shared by the ranks of one communicator.
struct Clique {
  std::mutex mutex;
  int size = 0, joined = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> messages;  // (from, to)
};

std::mutex cliques_mutex;
std::map<std::string, std::shared_ptr<Clique>>& cliques() {
  static auto* all = new std::map<std::string, std::shared_ptr<Clique>>;
  return *all;
}
std::atomic<int> next_clique{1};
std::atomic<int> failing_rank{-1};

struct Receive {
  void* data;
  size_t bytes;
  int from;
};
/// One call, or all of a group.
struct Work {
  std::vector<std::pair<int, std::shared_ptr<Message>>> sends;
  std::vector<Receive> receives;
  std::vector<std::function<void()>> here;  // copies within the rank
  bool begun = false;
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  bool blocking = true;
  std::atomic<bool> ready{false}, aborted{false};
  std::atomic<ncclResult_t> state{ncclSuccess};
  std::string last_error;
};

namespace {

struct Group {
  int depth = 0;
  ncclComm* comm = nullptr;
  cudaStream_t stream = nullptr;
  Work work;
};
thread_local Group group;

bool is_device(const void* p, size_t bytes) {
  emu::Memory memory;
  return emu::find_memory(p, bytes, memory) && memory != emu::Memory::pageable;
}

/// When its stream reaches it, posts the sends; receives available messages whenever it is queried.
ncclResult_t start(ncclComm* comm, cudaStream_t stream, Work work) {
  const auto shared = std::make_shared<Work>(std::move(work));
  emu::enqueue_pending(stream, [comm, clique = comm->clique, shared] {
    if (comm->aborted) return true;
    const std::lock_guard lock(clique->mutex);
    if (!shared->begun) {
      shared->begun = true;
      for (const auto& copy : shared->here) copy();
      for (const auto& [to, message] : shared->sends) clique->messages[{comm->rank, to}].push_back(message);
    }
    for (Receive& r : shared->receives) {
      if (!r.data) continue;
      auto& box = clique->messages[{r.from, comm->rank}];
      if (box.empty()) return false;
      if (box.front()->bytes != r.bytes) {
        comm->last_error = "a message of " + std::to_string(box.front()->bytes) + " bytes where " +
                           std::to_string(r.bytes) + " were expected";
        comm->state = ncclInvalidUsage;
        return false;
      }
      std::memcpy(r.data, box.front()->data, r.bytes);
      box.front()->taken = true;
      box.pop_front();
      r.data = nullptr;
    }
    for (const auto& [to, message] : shared->sends)
      if (!message->taken) return false;
    return true;
  });
  return comm->blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t check(ncclComm* comm, const void* data, size_t bytes, int peer) {
  if (!comm || !comm->ready) return ncclInvalidArgument;
  if (comm->aborted) return ncclInvalidUsage;
  if (peer < 0 || peer >= comm->clique->size || (bytes > 0 && !is_device(data, bytes))) {
    comm->last_error = "not memory of a device, or no such rank";
    return ncclInvalidArgument;
  }
  if (failing_rank == comm->rank) {
    comm->last_error = "a planted failure";
    comm->state = ncclRemoteError;
  }
  return ncclSuccess;
}

ncclResult_t add(ncclComm* comm, cudaStream_t stream, Work work) {
  if (group.depth == 0) return start(comm, stream, std::move(work));
  if (group.comm && (group.comm != comm || group.stream != stream)) return ncclInvalidUsage;
  group.comm = comm;
  group.stream = stream;
  for (auto& s : work.sends) group.work.sends.push_back(std::move(s));
  for (auto& r : work.receives) group.work.receives.push_back(r);
  for (auto& copy : work.here) group.work.here.push_back(std::move(copy));
  return ncclSuccess;
}

std::pair<int, std::shared_ptr<Message>> message(int to, const void* data, size_t bytes) {
  return {to, std::make_shared<Message>(Message{data, bytes})};
}

}  // namespace

namespace emu {
void fail_nccl_on(int rank) { failing_rank = rank; }
}  // namespace emu

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (static_cast<int>(result)) {  // the library's enum: only these are ever returned
    case ncclSuccess:
      return "no error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "an error that the emulator does not know";
  }
}
const char* ncclGetLastError(ncclComm_t comm) { return comm ? comm->last_error.c_str() : ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  const std::string name = "clique " + std::to_string(next_clique++);
  std::memcpy(id->internal, name.c_str(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (rank < 0 || rank >= size || id.internal[0] == 0) return ncclInvalidArgument;
  *comm = new ncclComm;
  const std::lock_guard lock(cliques_mutex);
  std::shared_ptr<Clique>& clique = cliques()[std::string(id.internal)];
  if (!clique) clique = std::make_shared<Clique>();
  if (clique->size != 0 && clique->size != size) return ncclInvalidArgument;
  clique->size = size;
  ++clique->joined;
  (*comm)->clique = clique;
  (*comm)->rank = rank;
  (*comm)->blocking = config->blocking != 0;
  (*comm)->state = ncclInProgress;
  return (*comm)->blocking ? ncclInvalidUsage : ncclInProgress;  // blocking communicators are not implemented
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (!comm) return ncclInvalidArgument;
  if (!comm->ready) {
    const std::lock_guard lock(cliques_mutex);
    if (comm->clique->joined == comm->clique->size) {
      comm->ready = true;
      comm->state = ncclSuccess;
    }
  }
  *state = comm->state;
  return ncclSuccess;
}

// Pending work on a stream still refers to the communicator, so it is kept. Its messages are dropped, because
// their memory may be freed.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  const std::lock_guard lock(comm->clique->mutex);
  for (auto& [ranks, box] : comm->clique->messages)
    if (ranks.first == comm->rank) box.clear();
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommAbort(comm); }

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return ncclInvalidUsage;
  if (--group.depth > 0 || !group.comm) return ncclSuccess;
  Group done;
  std::swap(done, group);
  return start(done.comm, done.stream, std::move(done.work));
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (const ncclResult_t bad = check(comm, data, count, peer); bad != ncclSuccess) return bad;
  return add(comm, stream, {{message(peer, data, count)}, {}, {}});
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (const ncclResult_t bad = check(comm, data, count, peer); bad != ncclSuccess) return bad;
  return add(comm, stream, {{}, {{data, count, peer}}, {}});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t bad = check(comm, to, count, root); bad != ncclSuccess) return bad;
  Work work;
  if (comm->rank != root)
    work.receives.push_back({to, count, root});
  else
    for (int r = 0; r < comm->clique->size; ++r)
      if (r != root) work.sends.push_back(message(r, from, count));
  if (comm->rank == root && from != to) work.here.push_back([=] { std::memcpy(to, from, count); });
  return add(comm, stream, std::move(work));
}
ncclResult_t ncclAllGather(const void* mine, void* all, size_t count, ncclDataType_t, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto size = static_cast<size_t>(comm->clique->size);
  if (const ncclResult_t bad = check(comm, mine, count, 0); bad != ncclSuccess) return bad;
  if (const ncclResult_t bad = check(comm, all, count * size, 0); bad != ncclSuccess) return bad;
  Work work;
  char* place = static_cast<char*>(all);
  for (int r = 0; r < comm->clique->size; ++r, place += count)
    if (r == comm->rank) {
      work.here.push_back([=] { std::memmove(place, mine, count); });
    } else {
      work.sends.push_back(message(r, mine, count));
      work.receives.push_back({place, count, r});
    }
  return add(comm, stream, std::move(work));
}

}  // extern "C"
#endif
