#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/strict_json.h"
#include "data/token_file.h"

namespace sluice {

namespace {

/// Fields of .idx are packed and little-endian, as is every machine this runs on.
template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void make_parent(const std::string& prefix) {
  const std::string folder = std::filesystem::path(prefix).parent_path().string();
  if (!folder.empty()) io::make_directories(folder);
}

}  // namespace

struct TokenFileWriter::Impl {
  static constexpr size_t kFlushBytes = size_t{4} << 20;

  std::string prefix;
  int64_t vocab_size;
  bool wide;
  std::unique_ptr<io::OutputFile> bin, idx;
  std::string buffer;
  std::vector<int32_t> lengths;
  int64_t tokens = 0;
  int64_t open = 0;  // tokens in the current document
  bool finished = false;

  std::string staged(const char* extension) const { return prefix + extension + ".tmp"; }

  static std::unique_ptr<io::OutputFile> create(const std::string& path) {
    if (io::exists(path)) io::remove_file(path);  // left by an interrupted run
    return std::make_unique<io::OutputFile>(path, io::OutputFile::Mode::create_new);
  }

  void flush(io::OutputFile& file) {
    file.write(buffer);
    buffer.clear();
  }

  void write_index() {
    const auto count = static_cast<int64_t>(lengths.size());
    buffer.assign("MMIDIDX\0\0", 9);
    append<uint64_t>(buffer, 1);
    append<uint8_t>(buffer, wide ? 4 : 8);
    append<uint64_t>(buffer, static_cast<uint64_t>(count));
    append<uint64_t>(buffer, static_cast<uint64_t>(count) + 1);
    const auto put = [&](auto value) {
      append(buffer, value);
      if (buffer.size() >= kFlushBytes) flush(*idx);
    };
    for (const int32_t length : lengths) put(length);
    int64_t pointer = 0;
    for (const int32_t length : lengths) {
      put(pointer);
      pointer += int64_t{length} * (wide ? 4 : 2);
    }
    for (int64_t d = 0; d <= count; ++d) put(d);
    flush(*idx);
  }

  void remove_staged() noexcept {
    for (auto* file : {&bin, &idx}) {
      if (!*file) continue;
      file->reset();
      try {
        io::remove_file(staged(file == &bin ? ".bin" : ".idx"));
      } catch (const Error&) {  // a leftover file under a name that nothing reads
      }
    }
  }
};

TokenFileWriter::TokenFileWriter(const std::string& prefix, int64_t vocab_size)
    : impl_(std::make_unique<Impl>()) {
  SLUICE_CHECK(vocab_size > 0, "TokenFileWriter: vocab_size is {}", vocab_size);
  impl_->prefix = prefix;
  impl_->vocab_size = vocab_size;
  impl_->wide = vocab_size >= 65500;  // the limit of Megatron's writer
  make_parent(prefix);
  try {
    impl_->bin = Impl::create(impl_->staged(".bin"));
    impl_->idx = Impl::create(impl_->staged(".idx"));
  } catch (...) {
    impl_->remove_staged();
    throw;
  }
}

TokenFileWriter::~TokenFileWriter() {
  if (!impl_->finished) impl_->remove_staged();
}

void TokenFileWriter::add_document(const int32_t* tokens, int64_t count) {
  add_part(tokens, count);
  end_document();
}

void TokenFileWriter::add_part(const int32_t* tokens, int64_t count) {
  Impl& w = *impl_;
  SLUICE_CHECK(!w.finished && count >= 0, "TokenFileWriter: {} tokens after finish or of negative length",
               count);
  if (count > std::numeric_limits<int32_t>::max() - w.open) {
    fail(ExitCode::data,
         "{}: document {} has {} tokens or more; the format holds up to 2^31 - 1 per sequence", w.prefix,
         num_documents(), w.open + count);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= w.vocab_size) {
      fail(ExitCode::data, "{}: document {}, token {}: {} is outside the vocabulary of {}", w.prefix,
           num_documents(), w.open + i, tokens[i], w.vocab_size);
    }
    if (w.wide) {
      append<int32_t>(w.buffer, tokens[i]);
    } else {
      append<uint16_t>(w.buffer, static_cast<uint16_t>(tokens[i]));
    }
    if (w.buffer.size() >= Impl::kFlushBytes) w.flush(*w.bin);
  }
  w.open += count;
}

void TokenFileWriter::end_document() {
  Impl& w = *impl_;
  if (w.open == 0) return;
  w.lengths.push_back(static_cast<int32_t>(w.open));
  w.tokens += w.open;
  w.open = 0;
}

void TokenFileWriter::finish() {
  Impl& w = *impl_;
  SLUICE_CHECK(!w.finished && w.open == 0, "TokenFileWriter: finish() twice or within a document");
  if (w.lengths.empty()) fail(ExitCode::data, "{}: there is no document to write", w.prefix);
  w.flush(*w.bin);
  w.write_index();
  for (auto* file : {&w.bin, &w.idx}) {
    (*file)->fsync();
    (*file)->close();
  }
  // The old .idx and .json are removed first, so that an interruption never leaves them beside new tokens.
  for (const char* old : {".idx", ".json"})
    if (io::exists(w.prefix + old)) io::remove_file(w.prefix + old);
  io::rename(w.staged(".bin"), w.prefix + ".bin");
  io::rename(w.staged(".idx"), w.prefix + ".idx");
  w.finished = true;
  const std::string folder = std::filesystem::path(w.prefix).parent_path().string();
  io::fsync_directory(folder.empty() ? "." : folder);
}

int64_t TokenFileWriter::num_tokens() const { return impl_->tokens; }
int64_t TokenFileWriter::num_documents() const { return static_cast<int64_t>(impl_->lengths.size()); }

void write_token_file_info(const std::string& prefix, const TokenFileInfo& info) {
  nlohmann::ordered_json j = {{"schema", 1},
                              {"tokenizer", info.tokenizer},
                              {"tokenizer_name", info.tokenizer_name},
                              {"vocab_size", info.vocab_size},
                              {"end_of_document", info.end_of_document},
                              {"documents", info.documents},
                              {"tokens", info.tokens},
                              {"text_bytes", info.text_bytes},
                              {"largest_token", info.largest_token},
                              {"token_bytes", info.token_bytes},
                              {"lost_bytes", info.lost_bytes}};
  if (!info.synthetic.empty()) j["synthetic"] = nlohmann::ordered_json::parse(info.synthetic);
  make_parent(prefix);
  io::write_file_atomic(prefix + ".json", j.dump(2) + "\n");
}

bool describes_tokens(const std::string& path) {
  SLUICE_CHECK(path.ends_with(".json"), "describes_tokens: {}", path);
  try {
    return read_token_file_info(path.substr(0, path.size() - 5)).has_value();
  } catch (const Error&) {
    return false;
  }
}

std::optional<TokenFileInfo> read_token_file_info(const std::string& prefix) {
  const std::string path = prefix + ".json";
  if (!io::exists(path)) return std::nullopt;
  const std::string text = io::read_file(path, int64_t{1} << 20);
  const nlohmann::json j = parse_strict_json(text, path);
  const auto value_of = [&](const char* key) -> const nlohmann::json& {
    if (!j.is_object() || !j.contains(key))
      fail(ExitCode::data,
           "{}: {}{}, so it does not describe token files, as what sluice tokenize writes does; restore or "
           "remove it",
           path, j.is_object() ? "has no " : "is no object of JSON", j.is_object() ? key : "");
    return j.at(key);
  };
  const auto text_of = [&](const char* key) {
    const nlohmann::json& value = value_of(key);
    if (!value.is_string())
      fail(ExitCode::data, "{}: {} must be text, got {}", path, key,
           printable(value.dump(-1, ' ', true), 60));
    return value.get<std::string>();
  };
  if (value_of("schema") != 1) fail(ExitCode::data, "{}: schema: only 1 is supported", path);
  // Without one of the optional keys, an older version wrote the file.
  const auto number = [&](const char* key, bool optional = false) {
    if (optional && !j.contains(key)) return int64_t{0};
    const nlohmann::json& value = value_of(key);
    const bool fits = value.is_number_unsigned() &&
                      value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!fits)
      fail(ExitCode::data, "{}: {} must be a whole number of at least 0, got {}", path, key,
           printable(value.dump(-1, ' ', true), 60));
    return value.get<int64_t>();
  };
  TokenFileInfo info;
  info.tokenizer = text_of("tokenizer");
  info.vocab_size = number("vocab_size");
  info.end_of_document = number("end_of_document");
  info.documents = number("documents");
  info.tokens = number("tokens");
  info.text_bytes = number("text_bytes");
  info.largest_token = number("largest_token");
  if (j.contains("tokenizer_name")) info.tokenizer_name = text_of("tokenizer_name");
  info.token_bytes = number("token_bytes", true);
  info.lost_bytes = number("lost_bytes", true);
  if (info.lost_bytes > info.text_bytes)
    fail(ExitCode::data, "{}: {} of {} bytes lost, {} in tokens: the counts are inconsistent", path,
         info.lost_bytes, info.text_bytes, info.token_bytes);
  return info;
}

}  // namespace sluice
