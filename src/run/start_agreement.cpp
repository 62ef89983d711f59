#include "run/start_agreement.h"

#include <spdlog/fmt/fmt.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "comm/collective_errors.h"
#include "comm/start_limit.h"
#include "core/build_id.h"
#include "core/build_info.h"
#include "core/host.h"
#include "core/strict_json.h"
#include "run/run_folder.h"

namespace sluice {
namespace {

constexpr char kFieldEnd = '\x1f', kFactEnd = '\x1e';
constexpr std::array<char, 8> kMagic = {'S', 'L', 'U', 'I', 'C', 'E', '\n', 0};
constexpr int32_t kProtocol = 1;  // version of the messages after the cards

/// The first message of a rank. Its size, and the offsets of all members up to `program`, are equal in every
/// build.
struct Card {
  std::array<char, 8> magic = kMagic;
  int32_t protocol = kProtocol;
  int32_t failed = 0;  // exit code of this rank's own error; 0: none
  std::array<char, 96> host{}, program{};
  int64_t bytes = 0;  // of the following text, which contains the facts and the error
  uint64_t hash = 0;  // of that text
  std::array<char, 288> unused{};
};
static_assert(sizeof(Card) == 512);

template <size_t N>
void put(std::array<char, N>& field, const std::string& text) {
  std::memcpy(field.data(), text.data(), std::min(text.size(), N - 1));
}
template <size_t N>
std::string get(const std::array<char, N>& field) {
  return printable(std::string_view(field.data(), strnlen(field.data(), N)));
}

/// The message of one rank.
struct Statement {
  StartFacts facts;
  std::string error;
  int failed = 0;
};

using Statements = std::vector<Statement>;

/// Groups the ranks by a value; values in the order of the ranks.
using ByValue = std::vector<std::pair<std::string, std::vector<int>>>;

void add(ByValue& values, const std::string& value, int rank) {
  for (auto& [text, ranks] : values)
    if (text == value) return ranks.push_back(rank);
  values.push_back({value, {rank}});
}

/// "ranks do not agree on train.seed: 7 on ranks 0-3 (host a), 8 on rank 4 (host b)"
std::string difference(const std::string& name, const ByValue& values,
                       const std::vector<std::string>& hosts) {
  constexpr size_t kMostBytes = 400;
  std::string text = "ranks do not agree on " + name;
  const char* before = ": ";
  for (const auto& [value, ranks] : values)
    text += fmt::format("{}{} on {}", std::exchange(before, ", "), printable(value, kMostBytes),
                        rank_text(ranks, hosts));
  return text;
}

/// All names stated by any rank, in the order of the ranks.
std::vector<std::pair<std::string, ExitCode>> names_of(const Statements& all) {
  std::vector<std::pair<std::string, ExitCode>> names;
  std::set<std::string> seen;
  for (const Statement& s : all)
    for (const StartFacts::Fact& fact : s.facts.all())
      if (seen.insert(fact.name).second) names.emplace_back(fact.name, fact.code);
  return names;
}

[[noreturn]] void refuse(const Statements& all, const std::vector<std::string>& hosts) {
  std::vector<std::string> lines;
  std::optional<ExitCode> code;
  ByValue errors;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].failed == 0) continue;
    add(errors, all[r].error, static_cast<int>(r));
    if (!code) code = static_cast<ExitCode>(all[r].failed);
  }
  const bool all_failed_alike = errors.size() == 1 && errors[0].second.size() == all.size();
  for (const auto& [error, ranks] : errors)
    lines.push_back(all_failed_alike ? error : fmt::format("{}: {}", rank_text(ranks, hosts), error));
  bool differ = false;
  for (const auto& [name, code_of_fact] : names_of(all)) {
    ByValue values;
    for (size_t r = 0; r < all.size(); ++r) {
      const StartFacts::Fact* fact = all[r].facts.find(name);
      // A rank whose preparation failed has not stated all of its facts.
      if (fact || all[r].failed == 0) add(values, fact ? fact->value : "(absent)", static_cast<int>(r));
    }
    if (values.size() < 2) continue;
    lines.push_back(difference(name, values, hosts));
    if (!code) code = code_of_fact;
    differ = true;
  }
  if (differ)
    lines.push_back("nothing was computed: start every rank with the same program, configuration and data");
  fail(code.value_or(ExitCode::internal), "{}", fmt::join(lines, "\n"));
}

std::vector<std::string> hosts_of(const std::vector<Card>& cards) {
  std::vector<std::string> hosts;
  for (const Card& card : cards) hosts.push_back(get(card.host));
  return hosts;
}

/// Refuses ranks that use another message format.
void require_same_protocol(const std::vector<Card>& cards) {
  ByValue programs;
  bool same = true;
  for (size_t r = 0; r < cards.size(); ++r) {
    const bool known = cards[r].magic == kMagic;
    same = same && known && cards[r].protocol == cards[0].protocol;
    add(programs, known ? get(cards[r].program) : "another program", static_cast<int>(r));
  }
  if (!same) fail(ExitCode::usage, "{}", difference("the program", programs, hosts_of(cards)));
}

/// The texts of all ranks, on every rank.
std::vector<std::string> gather_texts(Communicator& ranks, const std::string& mine,
                                      const std::vector<Card>& cards) {
  int64_t most = 1;
  for (const Card& card : cards) most = std::max(most, card.bytes);
  std::string padded = mine, all(static_cast<size_t>(most * ranks.size()), '\0');
  padded.resize(static_cast<size_t>(most), '\0');
  ranks.all_gather(all.data(), padded.data(), most);
  std::vector<std::string> texts;
  for (size_t r = 0; r < cards.size(); ++r)
    texts.push_back(all.substr(r * static_cast<size_t>(most), static_cast<size_t>(cards[r].bytes)));
  return texts;
}

}  // namespace

void StartFacts::set(const std::string& name, const std::string& value, ExitCode code) {
  const auto at = std::find_if(facts_.begin(), facts_.end(), [&](const Fact& f) { return f.name == name; });
  if (at == facts_.end())
    facts_.push_back({name, value, code});
  else
    *at = {name, value, code};
}

const StartFacts::Fact* StartFacts::find(const std::string& name) const {
  const auto at = std::find_if(facts_.begin(), facts_.end(), [&](const Fact& f) { return f.name == name; });
  return at == facts_.end() ? nullptr : &*at;
}

std::string StartFacts::serialize() const {
  std::string text;
  for (const Fact& fact : facts_)
    text += fact.name + kFieldEnd + fact.value + kFieldEnd + std::to_string(static_cast<int>(fact.code)) +
            kFactEnd;
  return text;
}

StartFacts StartFacts::parse(const std::string& text) {
  StartFacts facts;
  for (size_t begin = 0, end; (end = text.find(kFactEnd, begin)) != std::string::npos; begin = end + 1) {
    const size_t value = text.find(kFieldEnd, begin), code = text.find(kFieldEnd, value + 1);
    if (value >= end || code >= end) continue;
    facts.facts_.push_back({text.substr(begin, value - begin), text.substr(value + 1, code - value - 1),
                            static_cast<ExitCode>(std::atoi(text.c_str() + code + 1))});
  }
  return facts;
}

void agree_on_start(Communicator& ranks, const std::function<void(StartFacts&)>& prepare) {
  StartFacts facts;
  if (ranks.size() == 1) return prepare(facts);
  Card mine;
  std::string error;
  try {
    prepare(facts);
  } catch (const Error& e) {
    error = e.what();
    mine.failed = static_cast<int32_t>(e.code());
  }
  const std::string text = facts.serialize() + error;
  put(mine.host, host_name());
  put(mine.program, fmt::format("sluice {}, build {}", build_info().version, program_build_id()));
  mine.bytes = std::ssize(text);
  mine.hash = XXH3_64bits(text.data(), text.size());

  const StartLimit limit(ranks.rank(), facts.wait_seconds,
                         fmt::format("not all of the {} ranks have compared their configurations within {} s "
                                     "(parallel.timeout_seconds)",
                                     ranks.size(), facts.wait_seconds));
  std::vector<Card> cards(static_cast<size_t>(ranks.size()));
  ranks.all_gather(cards.data(), &mine, sizeof mine);
  require_same_protocol(cards);
  if (std::all_of(cards.begin(), cards.end(),
                  [&](const Card& c) { return c.hash == mine.hash && c.failed == 0; }))
    return;
  Statements all;
  const std::vector<std::string> texts = gather_texts(ranks, text, cards);
  for (size_t r = 0; r < texts.size(); ++r) {
    const size_t facts_end = texts[r].rfind(kFactEnd) + 1;  // 0 if there are none
    all.push_back(
        {StartFacts::parse(texts[r].substr(0, facts_end)), texts[r].substr(facts_end), cards[r].failed});
  }
  refuse(all, hosts_of(cards));
}

}  // namespace sluice
