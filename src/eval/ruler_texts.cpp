#include "eval/ruler_texts.h"

#include <xxhash.h>

#include <array>
#include <set>

#include "core/io.h"
#include "core/line_reader.h"
#include "core/strict_json.h"
#include "core/utf8.h"

namespace sluice {
namespace {

constexpr int64_t kLongestLine = int64_t{1} << 26;

constexpr std::array<std::string_view, 64> kAdjectives = {
    "amber",   "ancient", "bitter",  "bold",   "brave",  "bright",  "broad",  "calm",   "careful", "cheap",
    "clean",   "clever",  "cold",    "common", "crisp",  "curious", "damp",   "dark",   "deep",    "dense",
    "distant", "dry",     "eager",   "early",  "empty",  "faint",   "famous", "fancy",  "fierce",  "firm",
    "fresh",   "gentle",  "golden",  "grand",  "heavy",  "hollow",  "honest", "humble", "icy",     "idle",
    "jolly",   "keen",    "late",    "lively", "lonely", "loud",    "lucky",  "mild",   "modest",  "narrow",
    "noble",   "odd",     "patient", "plain",  "proud",  "quiet",   "rapid",  "rough",  "secret",  "sharp",
    "silent",  "smooth",  "steady",  "strange"};

constexpr std::array<std::string_view, 128> kNouns = {
    "anchor", "apple",   "arrow",    "autumn",   "badge",   "bakery",  "barrel", "basket", "beacon",
    "bell",   "blanket", "boat",     "bottle",   "branch",  "bridge",  "brush",  "bucket", "button",
    "cabin",  "candle",  "canyon",   "carpet",   "castle",  "cellar",  "chair",  "cherry", "circle",
    "cliff",  "clock",   "cloud",    "coast",    "coffee",  "compass", "copper", "corner", "cotton",
    "cradle", "creek",   "crown",    "curtain",  "desert",  "diamond", "door",   "dragon", "drum",
    "eagle",  "engine",  "fabric",   "falcon",   "farm",    "feather", "ferry",  "field",  "flame",
    "flute",  "forest",  "fountain", "fox",      "garden",  "garlic",  "gate",   "glove",  "grain",
    "guitar", "hammer",  "harbor",   "hawk",     "helmet",  "hill",    "honey",  "horse",  "island",
    "ivory",  "jacket",  "jungle",   "kettle",   "kitchen", "ladder",  "lake",   "lamp",   "lantern",
    "leaf",   "lemon",   "letter",   "lion",     "lizard",  "magnet",  "maple",  "market", "meadow",
    "mirror", "monkey",  "moon",     "mountain", "museum",  "needle",  "ocean",  "olive",  "orchard",
    "otter",  "paper",   "parrot",   "pebble",   "pencil",  "pepper",  "piano",  "pillow", "planet",
    "pocket", "pond",    "potato",   "prairie",  "puzzle",  "rabbit",  "radio",  "ribbon", "river",
    "rocket", "saddle",  "salmon",   "shadow",   "silver",  "spider",  "summer", "temple", "ticket",
    "tunnel", "window"};

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

bool ends_sentence(std::string_view word) {
  while (!word.empty() && std::string_view("\"')]").find(word.back()) != std::string_view::npos)
    word.remove_suffix(1);
  return !word.empty() && std::string_view(".!?").find(word.back()) != std::string_view::npos;
}

std::vector<std::string> texts_of(const nlohmann::json& line, const char* key, const std::string& where) {
  std::vector<std::string> texts;
  if (!line.is_object() || !line.contains(key) || !line[key].is_array() || line[key].empty())
    fail(ExitCode::data, "{}: a question needs \"{}\", a list of texts", where, key);
  for (const nlohmann::json& text : line[key]) {
    if (!text.is_string() || text.get<std::string>().empty())
      fail(ExitCode::data, "{}: \"{}\" must be a list of texts that are not empty", where, key);
    texts.push_back(text);
  }
  return texts;
}

}  // namespace

Haystack split_haystack(std::string_view text) {
  Haystack haystack;
  for (size_t at = 0; at < text.size();) {
    if (is_space(text[at])) {
      ++at;
      continue;
    }
    size_t end = at;
    while (end < text.size() && !is_space(text[end])) ++end;
    haystack.words.emplace_back(text.substr(at, end - at));
    haystack.ends_sentence.push_back(ends_sentence(haystack.words.back()));
    at = end;
  }
  return haystack;
}

std::string RulerTexts::fingerprint() const {
  std::string all;
  const auto add = [&](const std::string& text) { all += std::to_string(text.size()) + ":" + text; };
  for (const std::string& word : words) add(word);
  all += "\n";
  for (const std::string& word : short_words) add(word);
  if (!short_words.empty()) all += "\n";
  for (const std::string& word : haystack.words) add(word);
  for (const auto* questions : {&questions_1, &questions_2}) {
    all += "\n";
    for (const RulerQuestion& q : *questions) {
      add(q.question);
      for (const std::string& answer : q.answers) add(answer);
      for (const std::string& document : q.documents) add(document);
    }
  }
  const XXH128_hash_t hash = XXH3_128bits(all.data(), all.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::vector<std::string> built_in_words() {
  std::vector<std::string> words;
  for (const std::string_view adjective : kAdjectives)
    for (const std::string_view noun : kNouns) words.push_back(fmt::format("{}-{}", adjective, noun));
  return words;
}

std::vector<std::string> built_in_short_words() {
  std::vector<std::string> words(kAdjectives.begin(), kAdjectives.end());
  words.insert(words.end(), kNouns.begin(), kNouns.end());
  return words;
}

std::vector<std::string> read_words(const std::string& path) {
  std::vector<std::string> words;
  std::set<std::string> seen;
  LineReader reader(path);
  for (std::string line; reader.next(line, 4096);) {
    if (find_invalid_utf8(line) != std::string::npos)
      fail(ExitCode::data, "{}:{}: not UTF-8", path, reader.line_number());
    const Haystack on_line = split_haystack(line);
    for (const std::string& word : on_line.words)
      if (seen.insert(word).second) words.push_back(word);
  }
  if (words.size() < 64)
    fail(ExitCode::data, "{}: {} different words, but RULER's tasks need at least 64", path, words.size());
  return words;
}

Haystack read_haystack(const std::string& path) {
  Haystack haystack = split_haystack(io::read_file(path));
  if (haystack.words.size() < 100)
    fail(ExitCode::data, "{}: {} words are too few for a haystack; give a text of at least 100", path,
         haystack.words.size());
  return haystack;
}

std::vector<RulerQuestion> read_questions(const std::string& path) {
  std::vector<RulerQuestion> questions;
  LineReader reader(path);
  for (std::string line; reader.next(line, kLongestLine);) {
    const std::string where = fmt::format("{}:{}", path, reader.line_number());
    if (reader.within_line()) fail(ExitCode::data, "{}: the line is longer than 64 MiB", where);
    if (split_haystack(line).words.empty()) continue;
    const nlohmann::json json = parse_strict_json(line, where);
    if (!json.is_object() || !json.contains("question") || !json["question"].is_string())
      fail(ExitCode::data, "{}: a question needs \"question\", a text", where);
    questions.push_back(
        {json["question"], texts_of(json, "answers", where), texts_of(json, "documents", where)});
  }
  if (questions.empty()) fail(ExitCode::data, "{}: no question", path);
  return questions;
}

}  // namespace sluice
