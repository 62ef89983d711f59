// The tasks of RULER besides needles: chains of variables, common and frequent words, questions.
#include "eval/ruler_plan.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/error.h"

namespace sluice {
namespace {

std::string letters(Draw& draw, int count, char first) {
  std::string word;
  for (int i = 0; i < count; ++i) word += static_cast<char>(first + draw.below(26));
  return word;
}

// ---- variables ----

constexpr int64_t kHops = 4;

/// A chain of assignments, and where its lines stand among the noise, as shares of it.
struct Chain {
  std::vector<std::string> names, lines;
  std::string value;
  std::vector<double> places;
};

Chain drawn_chain(Draw& draw, int letters_of_name) {
  Chain chain;
  while (std::ssize(chain.names) < kHops + 1)
    if (std::string one = letters(draw, letters_of_name, 'A');
        std::find(chain.names.begin(), chain.names.end(), one) == chain.names.end())
      chain.names.push_back(std::move(one));
  chain.value = std::to_string(10000 + draw.below(90000));
  chain.lines.push_back(fmt::format("VAR {} = {}", chain.names[0], chain.value));
  for (size_t i = 1; i < chain.names.size(); ++i)
    chain.lines.push_back(fmt::format("VAR {} = VAR {}", chain.names[i], chain.names[i - 1]));
  for (size_t i = 0; i < chain.lines.size(); ++i) chain.places.push_back(draw.uniform());
  std::sort(chain.places.begin(), chain.places.end());
  return chain;
}

std::string chain_question(const Chain& chain, int64_t noise) {
  std::vector<std::string> lines;
  size_t next = 0;
  for (int64_t i = 0; i <= noise; ++i) {
    while (next < chain.lines.size() &&
           static_cast<int64_t>(chain.places[next] * static_cast<double>(noise + 1)) == i)
      lines.push_back(chain.lines[next++]);
    if (i < noise) lines.emplace_back(kNoise);
  }
  return fmt::format(
      "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{}\nQuestion: "
      "Find all variables that are assigned the value {} in the text above.",
      joined(lines, "\n"), chain.value);
}

std::string chain_answer(const Chain& chain) {
  return fmt::format(
      " Answer: According to the chain(s) of variable assignment in the text above, {} variables are "
      "assigned "
      "the value {}, they are: ",
      chain.names.size(), chain.value);
}

// ---- common words ----

constexpr int64_t kCommon = 10;

/// `size` words, of which the first ten come more often.
struct WordList {
  int64_t size, common_repeats, other_repeats;
};

/// "1. word 2. word": of words[order of i], i from 0.
std::string numbered(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i)
    text += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, words[i]);
  return text;
}

const std::string& word_at(const std::vector<std::string>& words, int64_t i, uint64_t key) {
  return words[permute_index(static_cast<uint64_t>(i), words.size(), key)];
}

std::string common_words_question(const std::vector<std::string>& words, const WordList& list, uint64_t key,
                                  Draw draw) {
  std::vector<std::string> all;
  for (int64_t i = 0; i < list.size; ++i)
    all.insert(all.end(), static_cast<size_t>(i < kCommon ? list.common_repeats : list.other_repeats),
               word_at(words, i, key));
  draw.shuffle(all);
  return fmt::format(
      "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
      "ones that appear most often.\n{}\nQuestion: What are the 10 most common words in the above list?",
      numbered(all));
}

std::vector<std::string> common_words(const std::vector<std::string>& words, uint64_t key) {
  std::vector<std::string> common;
  for (int64_t i = 0; i < kCommon; ++i) common.push_back(word_at(words, i, key));
  return common;
}

// ---- frequent words ----

constexpr int64_t kCodedWords = 2000;
constexpr double kZeta2 = 1.6449340668482264;  // sum of 1 / k^2

/// How often the k-th most frequent of about `size` words comes, by Zipf's law with exponent 2.
int64_t zipf_count(int64_t size, int64_t k) {
  return static_cast<int64_t>(static_cast<double>(size) / (static_cast<double>(k * k) * kZeta2));
}

}  // namespace

std::string joined(const std::vector<std::string>& parts, std::string_view between) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += between;
    text += parts[i];
  }
  return text;
}

std::vector<int64_t> Draw::distinct(int64_t count, int64_t n) {
  SLUICE_CHECK(count <= n, "ruler: {} different ones of {}", count, n);
  std::map<int64_t, int64_t> moved;  // of the list 0 ... n - 1, shuffled from its beginning on
  const auto at = [&](int64_t i) { return moved.count(i) ? moved[i] : i; };
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t j = i + below(n - i);
    chosen.push_back(at(j));
    moved[j] = at(i);
  }
  return chosen;
}

RulerPlan plan_variables(const RulerTexts&, uint64_t seed, const std::string& label) {
  constexpr int64_t kExampleNoise = 5;
  Draw draw(seed, label);
  const Chain example = drawn_chain(draw, 3), chain = drawn_chain(draw, 5);
  const std::string shown =
      chain_question(example, kExampleNoise) + chain_answer(example) + joined(example.names, " ") + "\n";
  return {1, int64_t{1} << 24, [chain, shown](int64_t size) {
            return RulerPrompt{.input = shown + chain_question(chain, size),
                               .answer_prefix = chain_answer(chain),
                               .outputs = chain.names};
          }};
}

RulerPlan plan_common_words(const RulerTexts& texts, int64_t length, uint64_t seed,
                            const std::string& label) {
  const bool is_short = length < 4096;
  const WordList example = is_short ? WordList{20, 3, 1} : WordList{40, 10, 3};
  const std::string prefix = " Answer: The top 10 words that appear most often in the list are:";
  Draw draw(seed, label);
  const uint64_t example_key = draw.bits(), key = draw.bits();
  const auto words_for = [&texts](int64_t size) -> const std::vector<std::string>& {
    return size <= std::ssize(texts.short_words) ? texts.short_words : texts.words;
  };
  const std::vector<std::string>& shown_words = words_for(example.size);
  const std::string shown =
      common_words_question(shown_words, example, example_key, Draw(seed, label + "/example")) + prefix +
      " " + numbered(common_words(shown_words, example_key)) + "\n";
  return {kCommon + 1, std::ssize(texts.words),
          [=](int64_t size) {
            const std::vector<std::string>& words = words_for(size);
            const WordList list = {size, is_short ? 6 : 30, is_short ? 1 : 3};
            return RulerPrompt{
                .input = shown + common_words_question(words, list, key, Draw(seed, label + "/order")),
                .answer_prefix = prefix,
                .outputs = common_words(words, key)};
          },
          std::ssize(texts.short_words)};
}

RulerPlan plan_frequent_words(uint64_t seed, const std::string& label) {
  // From 80 words on the fourth most frequent one comes more often than the fifth.
  return {
      80, int64_t{1} << 22, [=](int64_t size) {
        Draw draw(seed, label), order(seed, label + "/order");
        std::set<std::string> seen;
        std::vector<std::string> coded = {"......"}, all;  // the most frequent word is noise
        for (int64_t k = 1; k <= kCodedWords && zipf_count(size, k) > 0; ++k) {
          while (std::ssize(coded) < std::max<int64_t>(k, 4))
            if (std::string one = letters(draw, 6, 'a'); seen.insert(one).second)
              coded.push_back(std::move(one));
          all.insert(all.end(), static_cast<size_t>(zipf_count(size, k)), coded[static_cast<size_t>(k - 1)]);
        }
        order.shuffle(all);
        return RulerPrompt{
            .input = fmt::format(
                "Read the following coded text and track the frequency of each coded word. Find the three "
                "most frequently appeared coded words. {}\nQuestion: Do not provide any explanation. Please "
                "ignore the dots '....'. What are the three most frequently appeared words in the above "
                "coded text?",
                joined(all, " ")),
            .answer_prefix =
                " Answer: According to the coded text above, the three most frequently appeared words are:",
            .outputs = {coded[1], coded[2], coded[3]}};
      }};
}

RulerPlan plan_questions(const std::vector<RulerQuestion>& questions, int64_t sample, uint64_t seed,
                         const std::string& label) {
  const RulerQuestion& asked = questions[static_cast<size_t>(sample % std::ssize(questions))];
  Draw draw(seed, label);
  // Distractors are documents of other questions that this one does not have.
  std::set<std::string> seen(asked.documents.begin(), asked.documents.end());
  std::vector<std::string> others;
  for (const int64_t i : draw.distinct(std::ssize(questions), std::ssize(questions)))
    for (const std::string& document : questions[static_cast<size_t>(i)].documents)
      if (seen.insert(document).second) others.push_back(document);
  const auto own = static_cast<int64_t>(asked.documents.size());
  return {own, own + std::ssize(others), [=](int64_t size) {
            std::vector<std::string> documents = asked.documents;
            documents.insert(documents.end(), others.begin(), others.begin() + (size - own));
            Draw order(seed, label + "/order");
            order.shuffle(documents);
            RulerPrompt p;
            for (size_t i = 0; i < documents.size(); ++i) {
              if (documents[i] == asked.documents[0] && own == 1 && size > 1)
                p.depth = 100.0 * static_cast<double>(i) / static_cast<double>(size - 1);
              documents[i] = fmt::format("Document {}:\n{}", i + 1, documents[i]);
            }
            constexpr std::string_view kOrder =
                "Answer the question based on the given documents. Only give me the answer and do not output "
                "any other words.";
            p.input = fmt::format("{0}\n\nThe following are given documents.\n\n{1}\n\n{0}\n\nQuestion: {2}",
                                  kOrder, joined(documents, "\n\n"), asked.question);
            p.answer_prefix = " Answer:";
            p.outputs = asked.answers;
            return p;
          }};
}

}  // namespace sluice
