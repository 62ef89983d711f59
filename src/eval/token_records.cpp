#include "eval/token_records.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <limits>

#include "analysis/npy.h"
#include "core/host_view.h"
#include "data/loader.h"

namespace sluice {
namespace {

constexpr int64_t kMaxArrayBytes = int64_t{4} << 30;

double element(const Tensor& t, int64_t i) {
  return t.dtype == DType::f64 ? t.as<double>()[i] : static_cast<double>(t.as<float>()[i]);
}

/// The forward pass of a micro-batch, as evaluations fill it, with its losses and, where asked for, the
/// logits of one sample at a time.
class Pass {
 public:
  /// sizes: what measuring has found; all 0: measure.
  struct Sizes {
    int64_t activations = 0, host = 0, scratch = 0;
  };
  Pass(const TrainedModel& trained, bool with_logits, const Sizes& sizes)
      : activations_("activations", sizes.activations, trained.device()),
        host_("host", sizes.host),
        ctx(sizes.scratch, trained.device()) {
    const int64_t length = trained.config().data.seq_len;
    buffers = make_forward_buffers(trained, activations_, host_,
                                   trained.config().train.micro_batch_size * length, Recompute::none);
    if (with_logits)
      logits = activations_.alloc("logits", accumulate_dtype(trained.dtype()),
                                  {length, trained.config().model.vocab_size});
  }
  void run(const Transformer& model, const ValueZeroing* zeroing) {
    model.forward(ctx, buffers.batch, buffers.saved, {}, nullptr, zeroing);
    model.loss_forward(ctx, buffers.losses, buffers.batch, buffers.saved);
  }
  void run_logits(const Transformer& model, int64_t sample) {
    const int64_t length = logits.dim(0);
    model.logits(ctx, logits, buffers.saved.hidden.rows(sample * length, length));
  }
  Sizes sizes() const {
    return {activations_.high_water(), host_.high_water(), std::max<int64_t>(ctx.scratch.high_water(), 64)};
  }

 private:
  Arena activations_, host_;

 public:
  Context ctx;
  ForwardBuffers buffers;
  Tensor logits;
};

template <class T>
void write_records(const TrainedModel& trained, const Blend& set, int64_t samples,
                   const TokenRecordFiles& files, const ValueZeroing* zeroing) {
  const int64_t length = trained.config().data.seq_len, vocabulary = trained.config().model.vocab_size;
  const int64_t at_once = trained.config().train.micro_batch_size;
  const bool with_logits = !files.logits.empty();
  Pass measure(trained, with_logits, {});
  measure.run(trained.model(), zeroing);
  if (with_logits) measure.run_logits(trained.model(), 0);
  Pass pass(trained, with_logits, measure.sizes());
  std::vector<T> losses, logits;
  for (int64_t first = 0; first < samples; first += at_once) {
    const Batch& batch = pass.buffers.host;
    const int32_t* const targets = batch.targets.as<int32_t>();
    set.fill_sequential(first, at_once, batch.tokens.as<int32_t>(), batch.targets.as<int32_t>(),
                        batch.positions.as<int32_t>(), batch.first_key.as<int32_t>());
    pass.buffers.upload(pass.ctx);
    const int64_t count = std::min(at_once, samples - first);
    pass.run(trained.model(), zeroing);
    const HostView of_losses(pass.ctx, pass.buffers.losses);
    synchronize(pass.ctx);
    for (int64_t t = 0; t < count * length; ++t)
      losses.push_back(targets[t] < 0 ? std::numeric_limits<T>::quiet_NaN()
                                      : static_cast<T>(element(of_losses.tensor(), t)));
    for (int64_t sample = 0; with_logits && sample < count; ++sample) {
      pass.run_logits(trained.model(), sample);
      const HostView of_logits(pass.ctx, pass.logits);
      synchronize(pass.ctx);
      for (int64_t i = 0; i < length * vocabulary; ++i)
        logits.push_back(static_cast<T>(element(of_logits.tensor(), i)));
    }
  }
  if (!files.losses.empty()) write_npy(files.losses, {samples, length}, losses);
  if (!files.logits.empty()) write_npy(files.logits, {samples, length, vocabulary}, logits);
}

}  // namespace

void write_token_records(const TrainedModel& trained, const DataSource& set, int64_t max_tokens,
                         const TokenRecordFiles& files, const ValueZeroing* zeroing) {
  const Config& config = trained.config();
  const Blend blend({set}, config);
  int64_t samples = blend.num_sequential_samples();
  if (max_tokens > 0)
    samples = std::min(samples, (max_tokens + config.data.seq_len - 1) / config.data.seq_len);
  if (samples == 0) fail(ExitCode::data, "the set {} has no sample", set.name);
  const int64_t tokens = samples * config.data.seq_len;
  const int64_t size = trained.dtype() == DType::f64 ? 8 : 4;
  const int64_t per_token = files.logits.empty() ? 1 : config.model.vocab_size;
  if (tokens > kMaxArrayBytes / size / per_token)
    fail(ExitCode::usage, "{} tokens of {} values each are more than 4 GiB; give --max-tokens N", tokens,
         per_token);
  if (trained.dtype() == DType::f64)
    write_records<double>(trained, blend, samples, files, zeroing);
  else
    write_records<float>(trained, blend, samples, files, zeroing);
}

}  // namespace sluice
