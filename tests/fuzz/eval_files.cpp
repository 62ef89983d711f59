// Files that evaluation reads: tasks of multiple choice, RULER's prompts, questions, words and haystacks, and
// the answers that an earlier run has left. The input holds any of them, by name.
#include <algorithm>
#include <set>

#include "eval/ruler_files.h"
#include "eval/ruler_texts.h"
#include "eval/tasks.h"
#include "support/fuzz.h"

namespace sluice::fuzz {
namespace {

void read_as_task(const std::string& path) {
  const Task task = read_task(path);
  expect(!task.questions.empty(), "a task without questions");
  for (const TaskQuestion& q : task.questions)
    expect(q.choices.size() >= 2 && q.answer < q.choices.size(), "an answer that is no choice");
}

void read_as_questions(const std::string& path) {
  for (const RulerQuestion& q : read_questions(path))
    expect(!q.answers.empty() && !q.documents.empty(), "a question without answers or documents");
}

void read_as_words(const std::string& path) {
  const std::vector<std::string> words = read_words(path);
  expect(std::set<std::string>(words.begin(), words.end()).size() == words.size(), "a word comes twice");
  expect(std::none_of(words.begin(), words.end(), [](const std::string& w) { return w.empty(); }),
         "an empty word");
}

/// Whatever was kept has scores that can be summed up, and is the same when it is opened again.
void read_as_answers(const std::string& path, const std::string& text) {
  const nlohmann::ordered_json header = {{"schema", 1}};
  write(path, header.dump() + "\n" + text);
  size_t count = 0;
  {
    const RulerResults results(path, header);
    count = results.answers().size();
    const nlohmann::ordered_json summary = ruler_summary(results.answers(), header);
    for (const auto& [length, score] : summary["average"].items())
      expect(score.is_number() && score >= 0 && score <= 100, "an average that is no share");
    ruler_table(summary);
  }
  must("answers that were kept are refused", [&] {
    {  // one program at a time has the file
      RulerResults again(path, header);
      expect(again.answers().size() == count, "opened again, the file has other answers");
      int64_t sample = 0;
      while (again.has(RulerTask::vt, 64, sample)) ++sample;  // one that is there already counts once
      again.add({.task = RulerTask::vt, .length = 64, .sample = sample, .outputs = {"x"}, .prediction = "x"});
    }
    expect(RulerResults(path, header).answers().size() == count + 1, "an answer that was added is lost");
  });
}

void read_file(const std::string& name, const std::string& text) {
  write(name, text);
  if (name == "task.jsonl") read_as_task(name);
  if (name == "prompts.jsonl")
    for (const RulerPrompt& p : read_ruler_prompts(name))
      expect(!p.outputs.empty(), "a prompt without outputs");
  if (name == "questions.jsonl") read_as_questions(name);
  if (name == "words") read_as_words(name);
  if (name == "haystack") expect(read_haystack(name).words.size() >= 100, "a short haystack");
  if (name == "answers.jsonl") read_as_answers(name, text);
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::clear();
  for (const auto& file : fuzz::split(fuzz::text_of(data, size)))
    if (!file.first.empty()) fuzz::attempt([&] { fuzz::read_file(file.first, file.second); });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::mutated_lines(text, most, random))
