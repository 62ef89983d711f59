#include "eval/ruler.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <numeric>
#include <span>

namespace sluice {
namespace {

/// What a model wrote, as RULER reads it: control characters become line ends, white space around it goes.
std::string cleaned(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20) c = '\n';
  const auto begin = text.find_first_not_of(" \n"), end = text.find_last_not_of(" \n");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

/// A text from tokens may end within a character, which JSON cannot hold.
std::string valid_utf8(const std::string& text) {
  const nlohmann::json json = text;
  return nlohmann::json::parse(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

bool run_ruler(CachedModel& model, const Tokenizer& tokenizer, std::optional<int32_t> begin_token,
               const std::vector<RulerCell>& cells, const RulerShare& share, RulerResults& results,
               const std::function<void(const RulerAnswer&)>& progress, const std::function<bool()>& stop) {
  for (const RulerCell& cell : cells) {
    std::vector<RulerItem> items;
    std::vector<Continuation> prompts;
    for (int64_t sample = 0; sample < cell.samples; ++sample) {
      if (results.has(cell.task, cell.length, sample)) continue;
      items.push_back({cell.task, cell.length, sample, cell.prompt(sample)});
      Continuation c{tokens_of(items.back().prompt, tokenizer), tokens_to_generate(cell.task)};
      items.back().prompt.tokens = std::ssize(c.prompt);
      if (begin_token) c.prompt.insert(c.prompt.begin(), *begin_token);
      if (std::ssize(c.prompt) + c.new_tokens > model.context())
        fail(ExitCode::usage,
             "RULER's {}, sample {}: a prompt of {} tokens and {} generated ones do not fit into the context "
             "of "
             "{}",
             name(cell.task), sample, c.prompt.size(), c.new_tokens, model.context());
      prompts.push_back(std::move(c));
    }
    // Prompts that begin alike follow each other: they share keys and values. The answers stay the same.
    std::vector<size_t> order(items.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return prompts[a].prompt < prompts[b].prompt; });
    std::vector<RulerItem> sorted_items;
    std::vector<Continuation> sorted_prompts;
    const auto first_of = [&](int64_t rank) {
      return static_cast<size_t>(std::ssize(order) * rank / share.ranks);
    };
    for (const size_t i :
         std::span(order).subspan(first_of(share.rank), first_of(share.rank + 1) - first_of(share.rank))) {
      sorted_items.push_back(std::move(items[i]));
      sorted_prompts.push_back(std::move(prompts[i]));
    }
    items = std::move(sorted_items);
    prompts = std::move(sorted_prompts);
    std::vector<std::vector<int32_t>> generated(items.size());
    bool stopped = false;
    continue_greedily(
        model, prompts,
        [&](int64_t i, int32_t token) {
          if (tokenizer.ends_text(token)) return false;
          generated[static_cast<size_t>(i)].push_back(token);
          return true;
        },
        [&](int64_t i) {
          const RulerItem& item = items[static_cast<size_t>(i)];
          const RulerPrompt& p = item.prompt;
          const std::string text = valid_utf8(cleaned(tokenizer.decode(generated[static_cast<size_t>(i)])));
          const RulerAnswer answer{
              item.task, item.length, item.sample, p.depth, ruler_score(item.task, p.outputs, text),
              p.tokens,  p.outputs,   text};
          results.add(answer);
          progress(answer);
          stopped = stop();
          return !stopped;
        });
    if (stopped) return false;
  }
  return true;
}

}  // namespace sluice
