// sluice tokenize: text to token files.
#include <spdlog/spdlog.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "data/token_check.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

namespace sluice {

namespace {

struct TokenizeOptions {
  std::vector<std::string> inputs;
  std::string output, tokenizer = "byte", key = "text", validation_output;
  std::string format = "auto";
  int64_t validation_every = 0;
  bool force = false;
};

constexpr std::string_view kSeparator = "<|endoftext|>";

/// Lines of a file or of standard input, gzipped or not (zlib passes plain text through).
class LineReader {
 public:
  explicit LineReader(const std::string& path) : path_(path == "-" ? "standard input" : path) {
    if (path != "-") {
      if (!io::exists(path)) fail(ExitCode::no_input, "{}: no such file", path);
      if (io::is_directory(path)) fail(ExitCode::no_input, "{}: is a folder; name its files", path);
    }
    file_ = path == "-" ? gzdopen(::dup(STDIN_FILENO), "rb") : gzopen(path.c_str(), "rb");
    if (!file_) fail(ExitCode::no_input, "{}: cannot open: {}", path_, std::strerror(errno));
    gzbuffer(file_, 1 << 18);
    buffer_.resize(size_t{1} << 20);
  }
  ~LineReader() { gzclose(file_); }
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  const std::string& path() const { return path_; }
  int64_t line_number() const { return line_number_; }

  /// The next line with its end, or false at the end of the file.
  bool next(std::string& line) {
    line.clear();
    while (true) {
      const void* newline = std::memchr(buffer_.data() + at_, '\n', filled_ - at_);
      const size_t end =
          newline ? static_cast<size_t>(static_cast<const char*>(newline) - buffer_.data()) + 1 : filled_;
      line.append(buffer_, at_, end - at_);
      at_ = end;
      if (newline || !refill()) break;
    }
    if (!line.empty()) ++line_number_;
    return !line.empty();
  }

 private:
  bool refill() {
    const int got = gzread(file_, buffer_.data(), static_cast<unsigned>(buffer_.size()));
    int code = Z_OK;
    const char* message = gzerror(file_, &code);
    if (got < 0 || (got == 0 && code == Z_BUF_ERROR)) {
      fail(ExitCode::data, "{}: cannot read: {}", path_,
           code == Z_ERRNO       ? std::strerror(errno)
           : code == Z_BUF_ERROR ? "the gzip data ends too early; is it a truncated copy?"
                                 : message);
    }
    at_ = 0;
    filled_ = static_cast<size_t>(got);
    return got > 0;
  }

  std::string path_, buffer_;
  gzFile file_ = nullptr;
  size_t at_ = 0, filled_ = 0;
  int64_t line_number_ = 0;
};

/// A document on its way: as read, then its text, then its tokens.
struct Document {
  std::string raw;
  std::string where;  // file:line, for JSONL
  int64_t text_bytes = 0;
  std::vector<int32_t> tokens;
  std::exception_ptr error;
};

class Run {
 public:
  Run(const TokenizeOptions& options, const Tokenizer& tokenizer, const std::string& name)
      : options_(options), tokenizer_(tokenizer), tokenizer_name_(name), train_(options.output, tokenizer.vocab_size()) {
    if (options.validation_every > 0) validation_.emplace(options.validation_output, tokenizer.vocab_size());
  }

  void read(const std::string& input) {
    LineReader reader(input);
    const bool jsonl = is_jsonl(input);
    std::string line, text;
    while (reader.next(line)) {
      if (jsonl) {
        if (line.find_first_not_of(" \t\r\n") == std::string::npos) continue;
        add({std::move(line), fmt::format("{}:{}", reader.path(), reader.line_number()), 0, {}, {}});
        line = {};
      } else if (is_separator(line)) {
        add({std::move(text), {}, 0, {}, {}});
        text = {};
      } else {
        text += line;
      }
    }
    if (!text.empty()) add({std::move(text), {}, 0, {}, {}});
  }

  void finish() {
    flush();
    const double seconds = elapsed();
    if (train_.info.documents == 0) {
      fail(ExitCode::data, "there is no document{} in the input", validation_ ? " for training" : "");
    }
    if (validation_ && validation_->info.documents == 0) {
      fail(ExitCode::data, "{} documents are too few to hold out one in {}", train_.info.documents,
           options_.validation_every);
    }
    train_.finish(tokenizer_, tokenizer_name_);
    if (validation_) validation_->finish(tokenizer_, tokenizer_name_);
    progress(true);
    for (const Output* output : {&train_, validation_ ? &*validation_ : nullptr}) {
      if (!output) continue;
      const TokenFileInfo& info = output->info;
      fmt::print("{}: {} documents, {} tokens, {:.3f} bytes/token, largest id {} of {}\n", output->prefix,
                 info.documents, info.tokens,
                 static_cast<double>(info.text_bytes) / static_cast<double>(info.tokens), info.largest_token,
                 info.vocab_size);
    }
    fmt::print("{:.1f} MB of text in {:.2f} s: {:.1f} MB/s\n", megabytes(), seconds,
               megabytes() / std::max(seconds, 1e-9));
  }

 private:
  struct Output {
    Output(const std::string& prefix_, int64_t vocab_size) : prefix(prefix_), writer(prefix_, vocab_size) {}
    void finish(const Tokenizer& tokenizer, const std::string& tokenizer_name) {
      info.tokenizer = tokenizer.fingerprint();
      info.tokenizer_name = tokenizer_name;
      info.vocab_size = tokenizer.vocab_size();
      info.end_of_document = tokenizer.end_of_document();
      writer.finish();
      write_token_file_info(prefix, info);
    }
    std::string prefix;
    TokenFileWriter writer;
    TokenFileInfo info;
  };

  bool is_jsonl(std::string name) const {
    if (name.ends_with(".zst")) {
      fail(ExitCode::usage, "{}: zstd is not read here: zstd -dc {} | sluice tokenize - ...", name, name);
    }
    if (options_.format != "auto") return options_.format == "jsonl";
    if (name.ends_with(".gz")) name.resize(name.size() - 3);
    for (const char* ending : {".jsonl", ".ndjson", ".json"}) {
      if (name.ends_with(ending)) return true;
    }
    return false;
  }

  static bool is_separator(std::string_view line) {
    while (line.ends_with('\n') || line.ends_with('\r')) line.remove_suffix(1);
    return line == kSeparator;
  }

  void add(Document document) {
    pending_bytes_ += static_cast<int64_t>(document.raw.size());
    pending_.push_back(std::move(document));
    if (pending_bytes_ >= int64_t{16} << 20) flush();
  }

  void encode(Document& document) const {
    if (!document.where.empty()) document.raw = text_of(document);
    document.text_bytes = static_cast<int64_t>(document.raw.size());
    if (document.raw.empty()) return;
    document.tokens = tokenizer_.encode(document.raw);
    document.tokens.push_back(tokenizer_.end_of_document());
    document.raw = {};
  }

  std::string text_of(const Document& document) const {
    const auto object = nlohmann::json::parse(document.raw, nullptr, false);
    if (!object.is_object()) fail(ExitCode::data, "{}: not a JSON object in UTF-8", document.where);
    const auto found = object.find(options_.key);
    if (found == object.end() || !found->is_string()) {
      fail(ExitCode::data, "{}: has no text under the key \"{}\" (--key names another)", document.where,
           options_.key);
    }
    return found->get<std::string>();
  }

  /// Encodes what is pending on all threads, and writes it in order.
  void flush() {
    parallel_for(static_cast<int64_t>(pending_.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Document& document = pending_[static_cast<size_t>(i)];
        try {
          encode(document);
        } catch (...) {  // nothing may leave a thread; thrown again below, in the order of the documents
          document.error = std::current_exception();
        }
      }
    });
    for (Document& document : pending_) {
      if (document.error) std::rethrow_exception(document.error);
      if (document.tokens.empty()) continue;
      ++documents_;
      Output& output = validation_ && documents_ % options_.validation_every == 0 ? *validation_ : train_;
      output.writer.add_document(document.tokens.data(), static_cast<int64_t>(document.tokens.size()));
      output.info.documents += 1;
      output.info.tokens += static_cast<int64_t>(document.tokens.size());
      output.info.text_bytes += document.text_bytes;
      for (const int32_t token : document.tokens) {
        output.info.largest_token = std::max<int64_t>(output.info.largest_token, token);
      }
    }
    pending_.clear();
    pending_bytes_ = 0;
    progress(false);
  }

  void progress(bool last) const {
    if (!isatty(STDERR_FILENO)) return;
    const int64_t tokens = train_.info.tokens + (validation_ ? validation_->info.tokens : 0);
    fmt::print(stderr, "\r\033[K");
    if (!last)
      fmt::print(stderr, "{} documents, {} tokens, {:.1f} MB/s", documents_, tokens, megabytes() / elapsed());
    std::fflush(stderr);
  }

  double elapsed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  double megabytes() const {
    return static_cast<double>(train_.info.text_bytes + (validation_ ? validation_->info.text_bytes : 0)) /
           1e6;
  }

  const TokenizeOptions& options_;
  const Tokenizer& tokenizer_;
  const std::string tokenizer_name_;
  Output train_;
  std::optional<Output> validation_;
  std::vector<Document> pending_;
  int64_t pending_bytes_ = 0, documents_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Token files are not replaced unasked: a second call with other options would put other documents into a training's data, or
/// held-out documents back into it.
void check_outputs(const TokenizeOptions& options) {
  const auto normal = [](const std::string& prefix) { return std::filesystem::weakly_canonical(prefix); };
  if (!options.validation_output.empty() && normal(options.output) == normal(options.validation_output))
    fail(ExitCode::usage, "-o and --validation-prefix are both {}: held-out documents need files of their own", options.output);
  if (options.force) return;
  for (const std::string& prefix : {options.output, options.validation_output})
    for (const char* extension : {".bin", ".idx", ".json"})
      if (!prefix.empty() && io::exists(prefix + extension))
        fail(ExitCode::cannot_create, "{}{}: exists; choose another prefix, or --force to replace the token files {}", prefix, extension,
             prefix);
}

void tokenize(const TokenizeOptions& options) {
  if (options.validation_output.empty() != (options.validation_every == 0) || options.validation_every == 1 ||
      options.validation_every < 0) {
    fail(ExitCode::usage, "--validation-prefix and --validation-every (2 or more) go together");
  }
  if (options.format != "auto" && options.format != "text" && options.format != "jsonl") {
    fail(ExitCode::usage, "--format {}: known are auto, text and jsonl", options.format);
  }
  TokenizerConfig config;
  if (options.tokenizer != "byte") config = {TokenizerType::sentencepiece, options.tokenizer};
  const auto tokenizer = make_tokenizer(config);
  check_outputs(options);
  Run run(options, *tokenizer, tokenizer_name(config));
  for (const std::string& input : options.inputs) run.read(input);
  run.finish();
}

}  // namespace

void add_tokenize_command(Command& app, int&) {
  Command* command = app.add_subcommand("tokenize", "text to token files (Megatron .bin/.idx)");
  auto options = std::make_shared<TokenizeOptions>();
  command->add_option("input", options->inputs, "text or JSONL files, also gzipped; - is standard input")
      ->required()
      ->type_name("INPUT");
  command->add_option("-o,--output", options->output, "writes PREFIX.bin, PREFIX.idx and PREFIX.json")
      ->required()
      ->type_name("PREFIX");
  command
      ->add_option("--tokenizer", options->tokenizer, "byte, or a SentencePiece .model file (default: byte)")
      ->type_name("byte|PATH");
  command
      ->add_option("--format", options->format, "auto (by the name; standard input is text), text or jsonl")
      ->type_name("FORMAT");
  command->add_option("--key", options->key, "JSONL: the key of the text (default: text)")->type_name("NAME");
  command
      ->add_option("--validation-prefix", options->validation_output, "where every Nth document goes instead")
      ->type_name("PREFIX");
  command->add_option("--validation-every", options->validation_every, "N (2 or more)")->type_name("N");
  command->add_flag("--force", options->force, "replace token files that exist");
  command->footer(
      "A text file is one document, or several separated by lines that hold <|endoftext|>. An "
      "end-of-document token\n"
      "follows each. Empty documents are passed over.\n\n"
      "Examples:\n"
      "  sluice tokenize book.txt -o data/book\n"
      "  sluice tokenize web-*.jsonl.gz -o data/web --tokenizer english.model\n"
      "  zstd -dc web.jsonl.zst | sluice tokenize - --format jsonl -o data/web --validation-prefix data/held "
      "--validation-every 100\n");
  command->callback([options] { tokenize(*options); });
}

}  // namespace sluice
