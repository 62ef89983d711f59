// sluice generate: continue a text.
#include "eval/generate.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <memory>

#include "commands.h"
#include "core/cores.h"
#include "eval/trained_model.h"
#include "hf/open.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct GenerateOptions {
  std::string path, prompt, device, tokenizer;
  int64_t new_tokens = 200;
  Sampling sampling;
  std::vector<std::string> overrides;
  bool ignore_end = false;
};

/// Prints tokens as they are generated. A token may be part of a character, so text that may change with the
/// next token is held back.
class Stream {
 public:
  Stream(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt)
      : tokenizer_(tokenizer), prompt_(prompt) {}

  void add(int32_t token) {
    tokens_.push_back(token);
    const std::string text = tokenizer_.decode_behind(prompt_, tokens_);
    if (text.compare(0, printed_.size(), printed_) != 0 || text.ends_with("\xef\xbf\xbd")) return;
    print(text.substr(printed_.size()));
    printed_ = text;
  }
  void finish() {
    const std::string text = tokenizer_.decode_behind(prompt_, tokens_);
    if (text.size() > printed_.size()) print(text.substr(printed_.size()));
    print("\n");
  }
  void print(const std::string& text) const {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

 private:
  const Tokenizer& tokenizer_;
  const std::vector<int32_t>& prompt_;
  std::vector<int32_t> tokens_;
  std::string printed_;
};

void generate(const GenerateOptions& options) {
  const OpenOptions how{options.overrides, options.device, options.tokenizer, ModelUse::text};
  const TrainedModel trained(open_model(options.path, how), 1);
  use_threads(trained.config().train.threads);
  const Tokenizer& tokenizer = trained.tokenizer();
  std::vector<int32_t> prompt = tokenizer.encode_with_special(options.prompt);
  // Without a begin token a document starts behind the end of the one before.
  if (prompt.empty() && !trained.config().data.begin_token) prompt = {tokenizer.end_of_document()};

  Stream stream(tokenizer, prompt);
  stream.print(options.prompt);
  Generator generator(trained);
  if (const int64_t over = std::ssize(prompt) - generator.most_prompt_tokens(); over > 0)
    spdlog::warn(
        "the prompt has {} tokens, {} more than fit into the model's context: the first {} are left out",
        prompt.size(), over, over);
  generator.run(prompt, options.new_tokens, options.sampling, [&](int32_t token) {
    if (tokenizer.ends_text(token) && !(options.ignore_end && token == tokenizer.end_of_document()))
      return false;
    stream.add(token);
    return std::ferror(stdout) == 0;
  });
  stream.finish();
}

}  // namespace

void add_generate_command(Command& app, int&) {
  Command* command = app.add_subcommand("generate", "continue a text");
  auto options = std::make_shared<GenerateOptions>();
  add_model_argument(*command, options->path);
  command
      ->add_option("overrides", options->overrides,
                   "keys of the configuration, such as model.rope.scaling.type")
      ->type_name("key=value");
  command
      ->add_option("-p,--prompt", options->prompt, "text to continue; without it, a new document is started")
      ->type_name("TEXT");
  command->add_option("-n,--tokens", options->new_tokens, "maximum number of new tokens (200)")
      ->not_negative();
  command
      ->add_option("--temperature", options->sampling.temperature,
                   "sampling temperature; 0: always the most probable token (1)")
      ->not_negative();
  command
      ->add_option("--top-k", options->sampling.top_k, "sample from the k most probable tokens; 0: all (0)")
      ->not_negative();
  command
      ->add_option("--top-p", options->sampling.top_p,
                   "nucleus sampling: sample from the most probable tokens with this total probability (1)")
      ->between(1e-9, 1.0);
  command->add_option("--seed", options->sampling.seed, "the same seed gives the same text (0)");
  command->add_option("--device", options->device, "auto, cpu or cuda; overrides the run's train.device")
      ->type_name("DEVICE");
  add_tokenizer_option(*command, options->tokenizer);
  command->add_flag("--ignore-end", options->ignore_end, "continue after the end of a document");
  command->footer(
      "Examples:\n"
      "  sluice generate runs/gated -p \"In the beginning\" -n 300 --temperature 0.8\n"
      "  sluice generate runs/gated/ckpt/step_00001000 -p \"And\" --temperature 0\n");
  command->callback([options] { generate(*options); });
}

}  // namespace sluice
