// sluice ruler: RULER's thirteen long-context tasks with a trained model.
#include "eval/ruler.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>

#include "comm/mesh.h"
#include "comm/reduce.h"
#include "commands.h"
#include "config/derived.h"
#include "config/scalars.h"
#include "core/io.h"
#include "core/steady_clock.h"
#include "eval/trained_model.h"
#include "ranks.h"
#include "run/rank_threads.h"
#include "run/signals.h"
#include "run/start_facts.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct RulerCommand {
  std::string path, device, tokenizer, output, lengths = "1k", words, haystack, questions_1, questions_2;
  std::vector<std::string> tasks = {"all"}, prompts;
  int64_t samples = 100, together = 8, chunk = 512;
  int context = 1;
  uint64_t seed = 42;
  double yarn = 1;
  bool json = false;
  const Option *samples_option = nullptr, *lengths_option = nullptr;
  std::vector<std::pair<const char*, const Option*>> of_generated;  // options of prompts that are generated
};

/// "1k,4096": k is 1,024 here, as in the names of RULER's lengths.
std::vector<int64_t> parse_lengths(const std::string& text) {
  std::vector<int64_t> lengths;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    std::string part = text.substr(at, end - at);
    at = end + 1;
    const bool thousands = part.ends_with('k') || part.ends_with('K');
    int64_t length = 0;
    const std::string problem = parse_integer(thousands ? part.substr(0, part.size() - 1) : part, length);
    if (!problem.empty() || length < 1 || length > (int64_t{1} << 24))
      fail(ExitCode::usage, "--lengths {}: \"{}\" is no number of tokens such as 1k, 4k or 2000", text, part);
    lengths.push_back(thousands ? length * 1024 : length);
  }
  std::sort(lengths.begin(), lengths.end());
  if (std::adjacent_find(lengths.begin(), lengths.end()) != lengths.end())
    fail(ExitCode::usage, "--lengths {}: a length is given twice", text);
  return lengths;
}

std::vector<RulerTask> parse_tasks(const std::vector<std::string>& names) {
  std::vector<RulerTask> tasks;
  for (const std::string& one : names) {
    const auto task = ruler_task(one);
    if (!task) fail(ExitCode::usage, "--tasks {}: known are all, {}", one, fmt::join(kRulerTasks, ", "));
    if (std::find(tasks.begin(), tasks.end(), *task) != tasks.end())
      fail(ExitCode::usage, "--tasks: {} is given twice", one);
    tasks.push_back(*task);
  }
  return tasks;
}

RulerTexts texts_of(const RulerCommand& c) {
  RulerTexts texts;
  texts.words = c.words.empty() ? built_in_words() : read_words(c.words);
  if (c.words.empty()) texts.short_words = built_in_short_words();
  if (!c.haystack.empty()) texts.haystack = read_haystack(c.haystack);
  if (!c.questions_1.empty()) texts.questions_1 = read_questions(c.questions_1);
  if (!c.questions_2.empty()) texts.questions_2 = read_questions(c.questions_2);
  return texts;
}

/// The lengths, for a message.
std::string shown_lengths(const RulerCommand& c) {
  return c.lengths_option->given() ? "--lengths " + c.lengths
                                   : fmt::format("--lengths is not given, which means {}", c.lengths);
}

/// Configuration keys that stretch a model's positions by a factor, without training (YaRN, Peng et al.
/// 2023).
std::vector<std::string> yarn_overrides(const Config& config, double factor) {
  if (factor == 1) return {};
  if (!(factor > 1)) fail(ExitCode::usage, "--yarn {}: must be at least 1", factor);
  if (config.model.rope.scaling.type != RopeScalingType::none)
    fail(ExitCode::usage, "--yarn {}: the model has rope scaling already, by a factor of {}", factor,
         config.model.rope.scaling.factor);
  const int64_t positions = max_positions(config);
  return {"model.rope.scaling.type=yarn", fmt::format("model.rope.scaling.factor={}", factor),
          fmt::format("model.max_position_embeddings={}",
                      static_cast<int64_t>(static_cast<double>(positions) * factor))};
}

/// What stretches the positions so that `longest` tokens fit. yarn: --yarn, which stretches them already.
std::string stretching(const Config& config, double yarn, int64_t longest) {
  const double positions = static_cast<double>(max_positions(config));
  const double factor = std::ceil(static_cast<double>(longest) / positions *
                                  (yarn > 1 ? yarn : config.model.rope.scaling.factor));
  if (yarn > 1 || config.model.rope.scaling.type == RopeScalingType::none)
    return fmt::format("--yarn {} stretches them", factor);
  return fmt::format("model.rope.scaling.factor is {} and would have to be {}",
                     config.model.rope.scaling.factor, factor);
}

/// Generated prompts. Of all tasks those are left out that the texts or a length do not allow.
std::vector<RulerCell> generated_cells(const RulerCommand& c, const RulerTexts& texts,
                                       const Tokenizer& tokenizer, bool begin_token) {
  const bool all = c.tasks == std::vector<std::string>{"all"};
  std::vector<RulerCell> cells;
  const std::vector<RulerTask> tasks =
      parse_tasks(all ? std::vector<std::string>(kRulerTasks.begin(), kRulerTasks.end()) : c.tasks);
  for (const RulerTask task : tasks)
    for (const int64_t length : parse_lengths(c.lengths)) {
      try {
        const auto prompts = std::make_shared<RulerPrompts>(task, texts, tokenizer, length, c.seed,
                                                            tokens_to_generate(task) + begin_token);
        prompts->require_fit(c.samples);
        cells.push_back({task, length, c.samples, [prompts](int64_t i) { return prompts->make(i); }});
        if (const RulerPrompt first = prompts->make(0); first.longest && first.tokens < length * 9 / 10)
          spdlog::warn(
              "{} at a length of {}: the texts suffice for {} tokens only, under which its score stands",
              name(task), length, first.tokens);
      } catch (const Error& error) {
        if (!all || error.code() != ExitCode::usage) throw;
        spdlog::warn("left out: {}", error.what());
      }
    }
  if (cells.empty()) fail(ExitCode::usage, "{}: no task fits into so few tokens", shown_lengths(c));
  return cells;
}

/// Files of prompts are complete.
void refuse_of_generated(const RulerCommand& c) {
  for (const auto& [option, given] : c.of_generated)
    if (given->given()) fail(ExitCode::usage, "{} has no effect on --prompts; leave one of them out", option);
}

/// Prompts from files, all of them unless --samples is given. Their length is the next power of two.
/// begin_token: stands in front of each prompt.
std::vector<RulerCell> file_cells(const RulerCommand& c, const Tokenizer& tokenizer, bool begin_token) {
  std::vector<RulerCell> cells;
  for (const std::string& path : c.prompts) {
    const RulerTask task = task_of_file(path);
    const auto prompts = std::make_shared<std::vector<RulerPrompt>>(read_ruler_prompts(path));
    int64_t tokens = 0, length = 64;
    for (const RulerPrompt& p : *prompts)
      tokens = std::max<int64_t>(tokens, std::ssize(tokens_of(p, tokenizer)));
    while (length < begin_token + tokens + tokens_to_generate(task)) length *= 2;
    for (const RulerCell& cell : cells)
      if (cell.task == task && cell.length == length)
        fail(ExitCode::usage, "--prompts {}: a file of {} at a length of {} is given already", path,
             name(task), length);
    const int64_t count = std::ssize(*prompts);
    cells.push_back({task, length, c.samples_option->given() ? std::min(c.samples, count) : count,
                     [prompts](int64_t i) { return (*prompts)[static_cast<size_t>(i)]; }});
  }
  return cells;
}

/// RUN/ruler of a run folder or of a checkpoint in one.
std::string output_folder(const RulerCommand& c) {
  if (!c.output.empty()) return c.output;
  std::string path = c.path;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (!io::exists(path + "/MANIFEST.json")) return path + "/ruler";
  const size_t slash = path.rfind("/ckpt/");
  if (slash == std::string::npos)
    fail(ExitCode::usage, "{} is a checkpoint outside of a run: give a folder for the answers with -o",
         c.path);
  return path.substr(0, slash) + "/ruler";
}

std::string content_hash(const std::vector<std::string>& paths) {
  std::string all;
  for (const std::string& path : paths) {
    const std::string text = io::read_file(path);
    all += fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
  }
  return all;
}

/// Table 5 of the Gated Attention paper at the lengths of a summary: other models, for comparison.
std::string paper_rows(const nlohmann::ordered_json& summary) {
  struct Row {
    const char* name;
    std::map<int64_t, double> scores;
  };
  static const std::vector<Row> kRows = {
      {"baseline", {{4096, 88.89}, {8192, 85.88}, {16384, 83.15}, {32768, 79.50}}},
      {"gate", {{4096, 90.56}, {8192, 87.11}, {16384, 84.61}, {32768, 79.77}}},
      {"baseline, YaRN",
       {{4096, 82.90}, {8192, 71.52}, {16384, 61.23}, {32768, 37.94}, {65536, 37.51}, {131072, 31.65}}},
      {"gate, YaRN",
       {{4096, 88.13}, {8192, 80.01}, {16384, 76.74}, {32768, 72.88}, {65536, 66.60}, {131072, 58.82}}}};
  std::string text;
  std::map<int64_t, bool> lengths;
  for (const auto& cell : summary["cells"]) lengths[cell["length"].get<int64_t>()] = true;
  for (const Row& row : kRows) {
    std::string line = fmt::format("{:<18}", row.name);
    bool any = false;
    for (const auto& [length, unused] : lengths) {
      const auto found = row.scores.find(length);
      any = any || found != row.scores.end();
      line += fmt::format("{:>9}", found == row.scores.end() ? "-" : fmt::format("{:.1f}", found->second));
    }
    if (any) text += line + "\n";
  }
  return text.empty()
             ? text
             : "\nThe paper's 1.7B models (Qiu et al. 2025, table 5; 13 tasks), not this program's:\n" + text;
}

/// What all ranks have in common.
struct Inputs {
  CheckpointInfo checkpoint;
  std::unique_ptr<TrainedModel> trained;
  RulerTexts texts;
  std::vector<RulerCell> cells;
  int64_t longest = 0;
  nlohmann::ordered_json header;  // what the answers depend on
};

/// Into `in`, which stays where it is: the prompts are made from its texts.
void read_inputs(Inputs& in, StartFacts& facts, const RulerCommand& c, const Mesh& mesh) {
  state_program(facts);
  if (c.together < 1 || c.chunk < 1 || c.samples < 1)
    fail(ExitCode::usage, "--samples, --together and --chunk must be at least 1");
  if (!c.prompts.empty()) refuse_of_generated(c);
  in.checkpoint = find_checkpoint(c.path);
  const std::vector<std::string> overrides =
      yarn_overrides(checkpoint_config(in.checkpoint, c.device), c.yarn);
  ModelFiles files = checkpoint_files(in.checkpoint, c.device, c.tokenizer, overrides);
  if (c.context > 1 && resolve_device(files.config.train.device) != Device::cpu)
    fail(ExitCode::usage, "--context {}: ranks share prompts on CPUs only; add --device cpu", c.context);
  in.trained =
      std::make_unique<TrainedModel>(std::move(files), std::max<int64_t>(c.chunk / c.context, 1),
                                     c.context > 1 ? &mesh.context() : nullptr, CachedModel::kSharedTokens);
  const TrainedModel& trained = *in.trained;
  const bool begins = trained.config().data.begin_token.has_value();
  in.texts = texts_of(c);
  in.cells = c.prompts.empty() ? generated_cells(c, in.texts, trained.tokenizer(), begins)
                               : file_cells(c, trained.tokenizer(), begins);
  for (const RulerCell& cell : in.cells) in.longest = std::max(in.longest, cell.length);
  if (const int64_t positions = max_positions(trained.config()); in.longest > positions && c.prompts.empty())
    fail(ExitCode::usage, "{}: {} tokens are more than the model's {} positions; {}", shown_lengths(c),
         in.longest, positions, stretching(trained.config(), c.yarn, in.longest));
  in.longest = std::min(in.longest, max_positions(trained.config()));
  in.header = {{"schema", 1},
               {"run", trained.config().name},
               {"step", in.checkpoint.step},
               {"checkpoint", content_hash({in.checkpoint.path + "/MANIFEST.json"})},
               {"yarn", c.yarn},
               {"seed", c.seed},
               {"texts", in.texts.fingerprint()},
               {"prompts", content_hash(c.prompts)},
               {"tokenizer", trained.tokenizer().fingerprint()}};
  facts.set("what the answers depend on", in.header.dump());
  std::string cells;
  for (const RulerCell& cell : in.cells)
    cells += fmt::format(" {}/{}/{}", name(cell.task), cell.length, cell.samples);
  facts.set("tasks, lengths and samples", cells);
  facts.set("--context, --chunk and --together", fmt::format("{} {} {}", c.context, c.chunk, c.together));
  state_device(facts, trained.config());
}

void run(const RulerCommand& c, Communicator& ranks, int& exit_code) {
  const bool leads = ranks.rank() == 0;
  if (c.context != 1 && (c.context < 1 || CachedModel::kSharedTokens % (2 * c.context) != 0))
    fail(ExitCode::usage, "--context {}: as many ranks can share a prompt as 1, 2, 4, 8, 16 or 32",
         c.context);
  require_groups(ranks, fmt::format("--context {}", c.context), c.context);
  const Mesh mesh(ranks, {.context = c.context});
  if (!leads) spdlog::set_level(spdlog::level::err);  // warnings come from rank 0
  Inputs in;
  agree_on_start(ranks, [&](StartFacts& facts) { read_inputs(in, facts, c, mesh); });
  const TrainedModel& trained = *in.trained;
  use_threads(trained.config().train.threads, ranks);
  const auto begin = trained.config().data.begin_token;
  const std::string folder = output_folder(c);
  const std::string base =
      fmt::format("{}/step_{:08}{}{}", folder, in.checkpoint.step,
                  c.yarn == 1 ? "" : fmt::format("_yarn{:g}", c.yarn), c.prompts.empty() ? "" : "_given");
  if (leads) io::make_directories(folder);
  const bool keeps = mesh.context().rank() == 0;  // of those that share prompts, one keeps the answers
  const auto open = [&] {
    return std::make_unique<RulerResults>(base + ".jsonl", in.header, mesh.data().rank(), keeps);
  };
  std::unique_ptr<RulerResults> opened;
  if (leads) opened = open();
  ranks.barrier();
  if (!leads) opened = open();
  RulerResults& results = *opened;
  const auto known = static_cast<std::ptrdiff_t>(results.answers().size());
  CachedModel model(trained, {.context = in.longest, .sequences = c.together, .chunk = c.chunk});

  const StopSignals signals;
  const double start = steady_seconds();
  std::map<std::pair<RulerTask, int64_t>, std::pair<int64_t, double>> done;
  const auto progress = [&](const RulerAnswer& a) {
    auto& [count, score] = done[{a.task, a.length}];
    ++count;
    score += a.score;
    if (count % 25 == 0 && leads)
      fmt::print(stderr, "{} {}: {} answers{}, {:.1f}%\n", name(a.task), a.length, count,
                 mesh.data().size() > 1 ? " of rank 0" : "", 100 * score / static_cast<double>(count));
  };
  const bool stopped = !run_ruler(
      model, trained.tokenizer(), begin ? std::optional<int32_t>(static_cast<int32_t>(*begin)) : std::nullopt,
      in.cells, {.rank = mesh.data().rank(), .ranks = mesh.data().size()}, results, progress,
      [&] { return any_rank(mesh.context(), signals.requested()); });
  const bool incomplete = any_rank(ranks, stopped);
  if (incomplete) exit_code = static_cast<int>(ExitCode::preempted);
  if (!leads) return;
  results.take_over();
  std::vector<RulerAnswer> asked;  // of this call: the file may hold more
  for (const RulerAnswer& a : results.answers())
    for (const RulerCell& cell : in.cells)
      if (a.task == cell.task && a.length == cell.length && a.sample < cell.samples) asked.push_back(a);
  const nlohmann::ordered_json summary = ruler_summary(asked, in.header);
  io::write_file_atomic(base + ".json", summary.dump(1) + "\n");
  if (c.json) {
    fmt::print("{}\n", summary.dump());
  } else {
    fmt::print("{}  step {}: share of references found, percent\n\n{}{}", in.checkpoint.path,
               in.checkpoint.step, ruler_table(summary), paper_rows(summary));
    const auto answered = std::ssize(results.answers()) - known;
    int64_t tokens = 0;
    for (auto a = results.answers().begin() + known; a != results.answers().end(); ++a) tokens += a->tokens;
    if (const double seconds = steady_seconds() - start; answered > 0)
      fmt::print("\n{} answers in {:.0f} s ({:.0f} tokens of prompts per second); kept in {}.jsonl\n",
                 answered, seconds, static_cast<double>(tokens) / seconds, base);
  }
  if (incomplete) spdlog::warn("stopped by {}; the same command goes on", signals.name());
}

}  // namespace

void add_ruler_command(Command& app, int& exit_code) {
  Command* command =
      app.add_subcommand("ruler", "RULER's long-context tasks: needles, chains, counts, questions");
  auto c = std::make_shared<RulerCommand>();
  command->add_option("model", c->path, "run folder (its newest valid checkpoint) or checkpoint")
      ->required()
      ->type_name("RUN|CKPT");
  const auto generated = [&](const char* name, auto& target, const char* help) {
    Option* const option = command->add_option(name, target, help);
    c->of_generated.emplace_back(name, option);
    return option;
  };
  c->lengths_option =
      generated("--lengths", c->lengths, "tokens of a prompt with its answer, k being 1,024 (default: 1k)")
          ->type_name("L,L,...");
  generated("--tasks", c->tasks,
            "all that texts and length allow, or names: niah_single_1 to _3, niah_multikey_1 to _3, "
            "niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1, qa_2 (all)")
      ->delimiter(',')
      ->type_name("TASK,...");
  c->samples_option = command->add_option(
      "--samples", c->samples,
      "prompts per task and length; RULER's own has 500 (100; with --prompts, all of a file)");
  generated("--seed", c->seed, "seed of the prompts (42)");
  generated("--haystack", c->haystack, "text in which needles of running text are hidden")->type_name("FILE");
  generated("--qa-1", c->questions_1, "questions of qa_1: JSONL with question, answers, documents")
      ->type_name("FILE");
  generated("--qa-2", c->questions_2, "questions of qa_2")->type_name("FILE");
  generated("--words", c->words, "words for keys and counts, one per line; without it, built-in ones")
      ->type_name("FILE");
  command
      ->add_option(
          "--prompts", c->prompts,
          "files in RULER's own form (input, outputs, answer_prefix) instead of generated prompts; each, "
          "or its folder, is named after its task")
      ->type_name("FILE...");
  command->add_option("--yarn", c->yarn, "stretch the model's positions by this factor, without training (1)")
      ->type_name("FACTOR");
  command->add_option("-o,--output", c->output, "folder of the answers (RUN/ruler)")->type_name("FOLDER");
  command->add_option("--together", c->together, "prompts that are continued at once (8)");
  command->add_option("--chunk", c->chunk, "tokens of a prompt that pass through the model together (512)");
  command
      ->add_option(
          "--context", c->context,
          "ranks that share every prompt: they divide its chunks, and each keeps all keys and values (1)")
      ->type_name("N");
  command->add_option("--device", c->device, "auto, cpu or cuda; overrides the run's train.device")
      ->type_name("DEVICE");
  add_tokenizer_option(*command, c->tokenizer);
  command->add_flag("--json", c->json, "print the summary as one line of JSON");
  command->footer(
      "Every answer is kept at once: the same command goes on where it was stopped. Under mpirun the ranks\n"
      "divide the prompts; with --context N, groups of N ranks do, and each prompt is read by N ranks "
      "together.\n"
      "Examples:\n"
      "  sluice ruler runs/gated --lengths 1k,2k,4k --haystack essays.txt\n"
      "  sluice ruler runs/gated --lengths 8k --yarn 4 --tasks niah_single_1,vt --samples 500\n"
      "  sluice ruler runs/gated --prompts ruler/4096/niah_single_1/validation.jsonl\n");
  command->callback(
      [c, &exit_code] { run_as_rank([&](Communicator& ranks) { run(*c, ranks, exit_code); }); });
}

}  // namespace sluice
