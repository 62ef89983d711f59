#include "eval/samples.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/host_view.h"
#include "core/strict_json.h"
#include "core/utf8.h"
#include "eval/sample_rows.h"

namespace sluice {
namespace {

struct Growing {
  std::vector<int32_t> tokens;
  size_t prompt = 0;  // tokens of the prompt
  bool ended = false;
};

/// One forward pass over the texts of a group, each in a sample of its own; returns the row of each one's
/// last token. Of a text that is longer than a sample, the begin token, where there is one, and the end are
/// computed.
std::vector<int64_t> forward(Context& ctx, const Transformer& model, ForwardBuffers& buffers,
                             SampleRows& rows, const std::vector<Growing*>& group, const DataConfig& data) {
  const int64_t seq_len = data.seq_len;
  const int64_t size = rows.tokens();
  std::vector<int64_t> last;
  for (int64_t row = 0; row < size; ++row) {
    const int64_t sample = row / seq_len, at = row % seq_len;
    int32_t token = 0;
    if (sample < std::ssize(group)) {
      const std::vector<int32_t>& tokens = group[static_cast<size_t>(sample)]->tokens;
      const int64_t count = std::min(std::ssize(tokens), seq_len), first = std::ssize(tokens) - count;
      const bool begins = at == 0 && data.begin_token;
      if (at < count) token = tokens[begins ? 0 : static_cast<size_t>(first + at)];
      if (at == count - 1) last.push_back(row);
    }
    rows.put(row, token, -1, at, sample * seq_len);
  }
  rows.upload(ctx);
  model.forward(ctx, buffers.batch, buffers.saved);
  return last;
}

/// -1 where a logit is NaN or infinite.
int32_t largest(const Tensor& logits) {
  const auto best = [&](const auto* values) {
    const auto* const end = values + logits.numel();
    const bool numbers = std::all_of(values, end, [](auto x) { return x < INFINITY; });
    return numbers ? static_cast<int32_t>(std::max_element(values, end) - values) : -1;
  };
  return logits.dtype == DType::f64 ? best(static_cast<const double*>(logits.data))
                                    : best(static_cast<const float*>(logits.data));
}

}  // namespace

std::optional<std::vector<SampleText>> continue_prompts(Context& ctx, const Transformer& model,
                                                        ForwardBuffers& buffers, const Tokenizer& tokenizer,
                                                        const DataConfig& data, int64_t vocab_size,
                                                        const std::vector<std::string>& prompts,
                                                        int64_t tokens, const std::function<bool()>& stop,
                                                        bool alone) {
  std::vector<Growing> all;
  for (const std::string& prompt : prompts) {
    Growing text{tokenizer.encode_with_special(prompt), 0, false};
    if (data.begin_token) text.tokens.insert(text.tokens.begin(), static_cast<int32_t>(*data.begin_token));
    if (text.tokens.empty()) text.tokens.push_back(tokenizer.end_of_document());
    text.prompt = text.tokens.size();
    all.push_back(std::move(text));
  }
  const DType dtype = buffers.losses.dtype;
  Arena memory("sample logits", vocab_size * 8 + 512, ctx.device);
  const Tensor logits = memory.alloc("logits", dtype, {1, vocab_size});
  SampleRows rows(model, buffers);
  const auto slots = static_cast<size_t>(rows.tokens() / data.seq_len);
  for (size_t begin = 0; begin < all.size(); begin += slots) {
    std::vector<Growing*> group;
    for (size_t i = begin; i < std::min(begin + slots, all.size()); ++i) group.push_back(&all[i]);
    const auto open = [&] {
      return std::any_of(group.begin(), group.end(), [](const Growing* text) { return !text->ended; });
    };
    // Ranks of different processors may round to different tokens, and yet have to go together.
    for (int64_t n = 0; n < tokens && (!alone || open()); ++n) {
      if (stop()) return std::nullopt;
      const std::vector<int64_t> last = forward(ctx, model, buffers, rows, group, data);
      for (size_t i = 0; i < group.size(); ++i) {
        if (group[i]->ended) continue;
        ScratchScope scratch(ctx.scratch);
        model.logits(ctx, logits, rows.hidden(ctx, scratch, last[i]));
        const HostView view(ctx, logits);
        synchronize(ctx);
        const int32_t token = rows.agreed(largest(view.tensor()));
        if (token < 0)  // on every rank
          fail(ExitCode::numeric, "prompt \"{}\": the model's logits are not finite: no token follows it",
               printable(prompts[begin + i], 60));
        group[i]->ended = tokenizer.ends_text(token);
        if (!group[i]->ended) group[i]->tokens.push_back(token);
      }
    }
  }
  std::vector<SampleText> samples;
  for (size_t i = 0; i < all.size(); ++i) {
    // The begin token may be none of the tokenizer's.
    const auto begin = all[i].tokens.begin() + (data.begin_token ? 1 : 0), end = all[i].tokens.end(),
               middle = all[i].tokens.begin() + static_cast<int64_t>(all[i].prompt);
    samples.push_back({prompts[i], tokenizer.decode_behind({begin, middle}, {middle, end})});
  }
  return samples;
}

std::string valid_text(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t valid = std::min(find_invalid_utf8(text), text.size());
    out += text.substr(0, valid);
    text.remove_prefix(valid);
    if (text.empty()) break;
    out += "\xef\xbf\xbd";
    text.remove_prefix(1);
  }
  return out;
}

std::string describe(const SampleText& sample) {
  const auto shown = [](const std::string& text) {
    std::string line;
    for (const char c : valid_text(text)) {
      if (c == '\n') {
        line += "\\n";
      } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
        line += ' ';
      } else {
        line += c;
      }
    }
    return line;
  };
  return fmt::format("  sample \"{}\" -> \"{}\"", shown(sample.prompt), shown(sample.text));
}

}  // namespace sluice
