// The eight tasks of RULER in which values are found by their keys.
#include <algorithm>
#include <cmath>
#include <set>

#include "core/error.h"
#include "eval/ruler_plan.h"

namespace sluice {
namespace {

enum class Hay : uint8_t { noise, text, needles };
enum class Kind : uint8_t { word, number, uuid };

struct Needles {
  Hay hay;
  Kind key, value;
  int64_t keys, values, queries;  // values: of each key
};

Needles needles_of(RulerTask task) {
  switch (task) {
    case RulerTask::niah_single_1:
      return {Hay::noise, Kind::word, Kind::number, 1, 1, 1};
    case RulerTask::niah_single_2:
      return {Hay::text, Kind::word, Kind::number, 1, 1, 1};
    case RulerTask::niah_single_3:
      return {Hay::text, Kind::word, Kind::uuid, 1, 1, 1};
    case RulerTask::niah_multikey_1:
      return {Hay::text, Kind::word, Kind::number, 4, 1, 1};
    case RulerTask::niah_multikey_2:
      return {Hay::needles, Kind::word, Kind::number, 1, 1, 1};
    case RulerTask::niah_multikey_3:
      return {Hay::needles, Kind::uuid, Kind::uuid, 1, 1, 1};
    case RulerTask::niah_multivalue:
      return {Hay::text, Kind::word, Kind::number, 1, 4, 1};
    case RulerTask::niah_multiquery:
      return {Hay::text, Kind::word, Kind::number, 4, 1, 4};
    case RulerTask::vt:
    case RulerTask::cwe:
    case RulerTask::fwe:
    case RulerTask::qa_1:
    case RulerTask::qa_2:
      break;
  }
  fail(ExitCode::internal, "ruler: {} has no needles", name(task));
}

std::string drawn(Kind kind, const std::vector<std::string>& words, Draw& draw) {
  switch (kind) {
    case Kind::word:
      return words[static_cast<size_t>(draw.below(std::ssize(words)))];
    case Kind::number:
      return std::to_string(1000000 + draw.below(9000000));
    case Kind::uuid: {
      const uint64_t a = draw.bits(), b = draw.bits();  // version 4, variant 1
      return fmt::format("{:08x}-{:04x}-4{:03x}-{:x}{:03x}-{:012x}", a >> 32, (a >> 16) & 0xffff, a & 0xfff,
                         8 + (b >> 62), (b >> 48) & 0xfff, b & 0xffffffffffff);
    }
  }
  fail(ExitCode::internal, "ruler: unknown kind of a needle");
}

std::string needle(Kind value_kind, const std::string& key, const std::string& value) {
  return fmt::format("One of the special magic {}s for {} is: {}.",
                     value_kind == Kind::number ? "number" : "uuid", key, value);
}

/// "a", "a, and b", "a, b, and c".
std::string listed(const std::vector<std::string>& keys) {
  if (keys.size() == 1) return keys[0];
  return joined({keys.begin(), keys.end() - 1}, ", ") + ", and " + keys.back();
}

struct Sample {
  Needles kind;
  std::vector<std::string> needles;  // in the order of their depths
  std::vector<double> depths;        // ascending, of 40
  std::vector<std::string> queries, answers, other_values;
  double depth = -1;
  std::vector<std::string> keys;  // all of them
};

Sample drawn_sample(RulerTask task, const RulerTexts& texts, Draw& draw) {
  Sample s{needles_of(task), {}, {}, {}, {}, {}, -1, {}};
  const auto fresh = [&](Kind kind, const std::vector<std::string>& taken) {
    for (;;)
      if (std::string one = drawn(kind, texts.words, draw);
          std::find(taken.begin(), taken.end(), one) == taken.end())
        return one;
  };
  struct Pair {
    std::string key, value;
  };
  std::vector<Pair> pairs;
  std::vector<std::string> values;
  for (int64_t k = 0; k < s.kind.keys; ++k) {
    s.keys.push_back(fresh(s.kind.key, s.keys));
    for (int64_t v = 0; v < s.kind.values; ++v) {
      values.push_back(fresh(s.kind.value, values));
      pairs.push_back({s.keys.back(), values.back()});
    }
  }
  for (const int64_t k : draw.distinct(s.kind.queries, s.kind.keys)) {
    s.queries.push_back(s.keys[static_cast<size_t>(k)]);
    for (const Pair& pair : pairs)
      if (pair.key == s.queries.back()) s.answers.push_back(pair.value);
  }
  for (int i = 0; i < 9; ++i) {
    s.other_values.push_back(fresh(s.kind.value, values));
    values.push_back(s.other_values.back());
  }
  draw.shuffle(pairs);
  for (const int64_t i : draw.distinct(std::ssize(pairs), 40))
    s.depths.push_back(std::round(100.0 * static_cast<double>(i) / 39));
  std::sort(s.depths.begin(), s.depths.end());
  for (size_t i = 0; i < pairs.size(); ++i) {
    s.needles.push_back(needle(s.kind.value, pairs[i].key, pairs[i].value));
    if (s.answers.size() == 1 && pairs[i].key == s.queries[0]) s.depth = s.depths[i];
  }
  return s;
}

/// Parts with the needles between them, each before the part at its depth.
std::string with_needles(const Sample& s, const std::vector<std::string>& parts, std::string_view between) {
  std::vector<std::string> all;
  size_t next = 0;
  for (size_t i = 0; i <= parts.size(); ++i) {
    const auto place = [&](double depth) {
      return static_cast<size_t>(static_cast<double>(parts.size()) * depth / 100);
    };
    while (next < s.needles.size() && place(s.depths[next]) == i) all.push_back(s.needles[next++]);
    if (i < parts.size()) all.push_back(parts[i]);
  }
  return joined(all, between);
}

/// The sentences of the first `words` words; a text that is too short begins again.
std::vector<std::string> sentences(const Haystack& haystack, int64_t words) {
  std::vector<std::string> all;
  std::string sentence;
  for (int64_t i = 0; i < words; ++i) {
    const auto at = static_cast<size_t>(i % std::ssize(haystack.words));
    if (!sentence.empty()) sentence += ' ';
    sentence += haystack.words[at];
    if (!haystack.ends_sentence[at] && i + 1 < words) continue;
    all.push_back(std::move(sentence));
    sentence.clear();
  }
  return all;
}

/// other_values: where it is not null, its first ones become values of needles that hide the one asked for,
/// as many as there are: only a value of the context tells whether a model looked its key up.
std::string context(const Sample& s, const RulerTexts& texts, int64_t size, uint64_t seed,
                    const std::string& label, std::vector<std::string>* other_values) {
  switch (s.kind.hay) {
    case Hay::noise:
      return with_needles(s, std::vector<std::string>(static_cast<size_t>(size), std::string(kNoise)), "\n");
    case Hay::text:
      return with_needles(s, sentences(texts.haystack, size), " ");
    case Hay::needles: {
      Draw draw(seed, label + "/others");  // a larger haystack begins like a smaller one
      std::vector<std::string> others;
      while (std::ssize(others) < size) {
        const std::string key = drawn(s.kind.key, texts.words, draw),
                          value = drawn(s.kind.value, texts.words, draw);
        if (key == s.keys[0] || value == s.answers[0]) continue;
        if (other_values && others.size() < other_values->size()) (*other_values)[others.size()] = value;
        others.push_back(needle(s.kind.value, key, value));
      }
      return with_needles(s, others, "\n");
    }
  }
  fail(ExitCode::internal, "ruler: unknown haystack");
}

}  // namespace

RulerPlan plan_needles(RulerTask task, const RulerTexts& texts, uint64_t seed, const std::string& label) {
  Draw draw(seed, label);
  return {
      1, int64_t{1} << 24, [s = drawn_sample(task, texts, draw), &texts, seed, label](int64_t size) {
        const std::string kind = s.kind.value == Kind::number ? "number" : "uuid", of = listed(s.queries);
        RulerPrompt p;
        if (s.answers.size() == 1) p.other_values = s.other_values;
        const std::string in = context(s, texts, size, seed, label, &p.other_values);
        p.outputs = s.answers;
        p.depth = s.depth;
        if (s.answers.size() == 1) {
          p.input = fmt::format(
              "A special magic {0} is hidden within the following text. Make sure to memorize it. I will "
              "quiz you about the {0} afterwards.\n{1}\nWhat is the special magic {0} for {2} mentioned in "
              "the provided text?",
              kind, in, of);
          p.answer_prefix =
              fmt::format(" The special magic {} for {} mentioned in the provided text is", kind, of);
        } else {
          p.input = fmt::format(
              "Some special magic {0}s are hidden within the following text. Make sure to memorize it. I "
              "will quiz you about the {0}s afterwards.\n{1}\nWhat are all the special magic {0}s for {2} "
              "mentioned in the provided text?",
              kind, in, of);
          p.answer_prefix =
              fmt::format(" The special magic {}s for {} mentioned in the provided text are", kind, of);
        }
        return p;
      }};
}

}  // namespace sluice
