#include "eval/batch_generate.h"

#include <algorithm>

#include "core/error.h"
#include "eval/sampling.h"

namespace sluice {
namespace {

/// A place for a sequence: what its cache holds of the last prompt, and the prompt that is continued.
struct Place {
  std::vector<int32_t> held;  // the prompt whose keys and values are in the cache
  int64_t prompt = -1;        // -1: free
  int64_t generated = 0;
  int32_t token = 0;  // the last one
};

class Continuations {
 public:
  Continuations(CachedModel& model, std::span<const Continuation> prompts,
                const std::function<int32_t(int64_t, std::span<const float>)>& choose,
                const std::function<bool(int64_t, int32_t)>& on_token,
                const std::function<bool(int64_t)>& on_done)
      : model_(model),
        prompts_(prompts),
        choose_(choose),
        on_token_(on_token),
        on_done_(on_done),
        places_(static_cast<size_t>(model.sequences())) {}

  void run() {
    std::vector<CachedModel::Next> next;
    while (!stopped_) {
      for (size_t p = 0; p < places_.size(); ++p)
        while (!stopped_ && places_[p].prompt < 0 && next_ < std::ssize(prompts_)) begin(p);
      next.clear();
      for (size_t p = 0; p < places_.size(); ++p)
        if (places_[p].prompt >= 0) next.push_back({static_cast<int64_t>(p), places_[p].token});
      if (next.empty() || stopped_) return;
      const std::span<const float> logits = model_.step(next);
      const auto size = static_cast<size_t>(model_.vocab_size());
      for (size_t i = 0; i < next.size() && !stopped_; ++i)
        take(places_[static_cast<size_t>(next[i].sequence)], logits.subspan(i * size, size));
    }
  }

 private:
  /// Puts the next prompt into a free place.
  void begin(size_t p) {
    Place& place = places_[p];
    place.prompt = next_++;
    place.generated = 0;
    const Continuation& c = prompts_[static_cast<size_t>(place.prompt)];
    const std::vector<int32_t>& tokens = c.prompt;
    const auto sequence = static_cast<int64_t>(p);
    int64_t from = sequence, kept = shared(place, tokens);
    for (size_t q = 0; q < places_.size(); ++q)
      if (const int64_t more = shared(places_[q], tokens); more > kept)
        from = static_cast<int64_t>(q), kept = more;
    model_.copy_sequence(from, sequence);
    model_.truncate(sequence, kept);
    if (c.new_tokens == 0) {
      place.held.assign(tokens.begin(), tokens.begin() + kept);
      return end(place);
    }
    place.held = tokens;
    const auto rest = std::span<const int32_t>(tokens).subspan(static_cast<size_t>(model_.length(sequence)));
    take(place, model_.prefill(sequence, rest));
  }

  /// Tokens of a prompt whose keys and values a place holds: whole chunks, so that the others begin as
  /// without them, and not the last token, whose logits are needed.
  int64_t shared(const Place& place, const std::vector<int32_t>& tokens) const {
    const auto same = std::mismatch(tokens.begin(), tokens.end(), place.held.begin(), place.held.end()).first;
    return std::min(same - tokens.begin(), std::ssize(tokens) - 1) / model_.chunk() * model_.chunk();
  }

  void take(Place& place, std::span<const float> logits) {
    place.token = choose_(place.prompt, logits);
    ++place.generated;
    const bool more = on_token_(place.prompt, place.token);
    if (!more || place.generated == prompts_[static_cast<size_t>(place.prompt)].new_tokens) end(place);
  }

  void end(Place& place) {
    if (!on_done_(place.prompt)) stopped_ = true;
    place.prompt = -1;
  }

  CachedModel& model_;
  std::span<const Continuation> prompts_;
  const std::function<int32_t(int64_t, std::span<const float>)>& choose_;
  const std::function<bool(int64_t, int32_t)>& on_token_;
  const std::function<bool(int64_t)>& on_done_;
  std::vector<Place> places_;
  int64_t next_ = 0;
  bool stopped_ = false;
};

}  // namespace

void continue_prompts(CachedModel& model, std::span<const Continuation> prompts,
                      const std::function<int32_t(int64_t, std::span<const float>)>& choose,
                      const std::function<bool(int64_t, int32_t)>& on_token,
                      const std::function<bool(int64_t)>& on_done) {
  for (const Continuation& c : prompts) {
    if (c.prompt.empty()) fail(ExitCode::usage, "an empty prompt cannot be continued");
    if (std::ssize(c.prompt) + c.new_tokens > model.context())
      fail(ExitCode::usage, "a prompt of {} tokens with {} new ones is longer than the context of {}",
           c.prompt.size(), c.new_tokens, model.context());
  }
  for (int64_t sequence = 0; sequence < model.sequences(); ++sequence) model.truncate(sequence, 0);
  Continuations(model, prompts, choose, on_token, on_done).run();
}

void continue_greedily(CachedModel& model, std::span<const Continuation> prompts,
                       const std::function<bool(int64_t, int32_t)>& on_token,
                       const std::function<bool(int64_t)>& on_done) {
  continue_prompts(
      model, prompts, [](int64_t, std::span<const float> logits) { return most_probable(logits); }, on_token,
      on_done);
}

}  // namespace sluice
