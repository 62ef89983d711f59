#pragma once
// What RULER's prompts are made of besides chance: words, the text of a haystack, questions with documents.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

/// A text by its words, without white space.
struct Haystack {
  std::vector<std::string> words;
  std::vector<bool> ends_sentence;  // of each word: . ! or ?, perhaps within quotes or brackets, is its end
};
Haystack split_haystack(std::string_view text);

struct RulerQuestion {
  std::string question;
  std::vector<std::string> answers;
  std::vector<std::string> documents;  // that hold the answer; other questions' are its distractors
};

struct RulerTexts {
  std::vector<std::string> words;  // for keys and counted words: all different
  /// What is counted in lists of up to so many different words: their tokens are fewer. Empty: `words`.
  std::vector<std::string> short_words = {};
  Haystack haystack;  // empty: the tasks in a running text cannot be made
  std::vector<RulerQuestion> questions_1, questions_2;

  /// Identifies the content.
  std::string fingerprint() const;
};

/// 8,192 pairs of an adjective and a noun: "quiet-harbor".
std::vector<std::string> built_in_words();
/// 192 adjectives and nouns, each by itself.
std::vector<std::string> built_in_short_words();
/// A file's words, one per line. Error(data): fewer than 64 different ones.
std::vector<std::string> read_words(const std::string& path);
/// Error(data): fewer than 100 words.
Haystack read_haystack(const std::string& path);
/// JSONL: "question" (text), "answers" (list of texts) and "documents" (list of texts), one question per
/// line. Error(data) with file and line.
std::vector<RulerQuestion> read_questions(const std::string& path);

}  // namespace sluice
