#include "eval/sample_rows.h"

#include "analysis/reading.h"
#include "analysis/whole_rows.h"
#include "core/device.h"
#include "core/host_view.h"

namespace sluice {

SampleRows::SampleRows(const Transformer& model, const ForwardBuffers& buffers)
    : ranks_(model.sequence_ranks()), buffers_(buffers), whole_(buffers.host) {
  if (!ranks_) return;
  const int64_t tokens = buffers.batch.tokens.numel() * ranks_->split().ranks;
  memory_.resize(static_cast<size_t>(4 * tokens));
  first_key_.resize(static_cast<size_t>(ranks_->split().seq_len));
  whole_ = batch_of(Tensor(memory_.data(), DType::i32, {4, tokens}, "whole samples"));
}

void SampleRows::put(int64_t at, int32_t token, int32_t target, int64_t position, int64_t first_key) const {
  whole_.tokens.as<int32_t>()[at] = token;
  whole_.targets.as<int32_t>()[at] = target;
  whole_.positions.as<int32_t>()[at] = static_cast<int32_t>(position);
  whole_.first_key.as<int32_t>()[at] = static_cast<int32_t>(first_key);
}

void SampleRows::upload(Context& ctx) {
  const int64_t length = ranks_ ? ranks_->split().seq_len : 0;
  for (int64_t i = 0; ranks_ && i < tokens() / length; ++i) {
    const auto row = [&](const Tensor& t) { return t.rows(i * length, length); };
    // Counted from the sample; before it where a sequence goes on from the sample before.
    for (int64_t t = 0; t < length; ++t)
      first_key_[static_cast<size_t>(t)] =
          row(whole_.first_key).as<int32_t>()[t] - static_cast<int32_t>(i * length);
    take_part(ranks_->split(), buffers_.host, i,
              {row(whole_.tokens), row(whole_.targets), row(whole_.positions),
               Tensor(first_key_.data(), DType::i32, {length})});
  }
  buffers_.upload(ctx);
}

std::vector<double> SampleRows::losses(Context& ctx) const {
  return whole_rows(ctx, ranks_, read_values(ctx, buffers_.losses), 1);
}

Tensor row_of_all(Context& ctx, ScratchScope& t, const SequenceRanks* ranks, const Tensor& rows,
                  int64_t token) {
  if (!ranks) return rows.rows(token, 1);
  const Tensor row = t.like("row of a rank", rows.rows(0, 1));
  const HostView view(ctx, rows);
  if (ctx.dry_run) return row;
  const std::vector<char> bytes =
      rows_of_tokens(ranks, {token}, static_cast<const char*>(view.tensor().data), row.bytes());
  write_tensor(ctx, row, bytes.data());
  return row;
}

Tensor SampleRows::hidden(Context& ctx, ScratchScope& t, int64_t token) const {
  return row_of_all(ctx, t, ranks_, buffers_.saved.hidden, token);
}

int32_t SampleRows::agreed(int32_t found) const {
  if (!ranks_) return found;
  std::vector<int32_t> all(static_cast<size_t>(ranks_->split().ranks));
  ranks_->ranks().all_gather(all.data(), &found, sizeof found);
  return all[0];
}

}  // namespace sluice
