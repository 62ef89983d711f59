#include "train/communication.h"

#include <spdlog/fmt/fmt.h>

#include <initializer_list>
#include <utility>

namespace sluice {
namespace {

DeviceTransport transport_of(Transport transport) {
  switch (transport) {
    case Transport::automatic:
      return DeviceTransport::automatic;
    case Transport::nccl:
      return DeviceTransport::nccl;
    case Transport::host:
      return DeviceTransport::host;
  }
  fail(ExitCode::internal, "unknown transport");
}

bool several(const Communicator* ranks) { return ranks && ranks->size() > 1; }

/// Whether gradients or weights pass between ranks, or into pieces, beside the computation.
bool needs_queue(const ParallelConfig& config, const Communicator* ranks, Device device) {
  return several(ranks) || (device == Device::cuda && config.zero_stage > 0);
}

}  // namespace

MeshShape mesh_shape(const ParallelConfig& p) {
  for (const auto& [name, ranks] :
       std::initializer_list<std::pair<const char*, int64_t>>{{"tensor", p.tensor}, {"pipeline", p.pipeline}})
    if (ranks != 1)
      fail(ExitCode::usage, "parallel.{} = {} is not available in this version; use 1", name, ranks);
  return {.tensor = static_cast<int>(p.tensor),
          .context = static_cast<int>(p.context),
          .expert = static_cast<int>(p.expert),
          .pipeline = static_cast<int>(p.pipeline)};
}

Communication::DeviceRanks::DeviceRanks(Communicator& host, CommQueue& queue, const ParallelConfig& config) {
  queue.run([&] {
    // Evaluation and saving may keep others waiting for long: the watchdog knows of them.
    constexpr double kBackstop = 20;
    world = make_device_communicator(
        host, queue.context(),
        {.transport = transport_of(config.transport), .timeout_seconds = kBackstop * config.timeout_seconds});
    mesh = std::make_unique<Mesh>(*world, mesh_shape(config));
  });
}

Communication::Communication(const ParallelConfig& config, Communicator* ranks, Device device, bool dry_run)
    : queue_(needs_queue(config, ranks, device) ? std::make_unique<CommQueue>(device) : nullptr),
      world_(several(ranks) ? queue_->queued(*ranks) : make_local_communicator()),
      mesh_(*world_, mesh_shape(config)),
      device_(queue_ && device == Device::cuda && !dry_run
                  ? std::make_unique<DeviceRanks>(several(ranks) ? *ranks : *world_, *queue_, config)
                  : nullptr) {}

std::unique_ptr<Communicator> Communication::of_gpus(MeshAxis axis, Context& ctx) {
  return device_ && mesh_.on(axis).size() > 1 ? queue_->queued(device_->mesh->on(axis), &ctx) : nullptr;
}

void Communication::finish() {
  if (queue_) queue_->finish();
}

std::string Communication::queue_problem() const {
  if (!queue_ || queue_->problem().empty()) return "";
  return fmt::format("communication: {}; it goes on in turn with the computation", queue_->problem());
}

std::string Communication::transport() const {
  return device_ && mesh_.world().size() > 1 ? device_->world->name() : "";
}

}  // namespace sluice
