#pragma once
// Data: the tokenizer, the token files, how samples are made of them.
#include <optional>
#include <string>
#include <vector>

#include "config/enum_names.h"

namespace sluice {

enum class TokenizerType : uint8_t { byte, sentencepiece, bpe };
enum class Packing : uint8_t { stream, documents };

SLUICE_ENUM_NAMES(TokenizerType, "byte", "sentencepiece", "bpe");
SLUICE_ENUM_NAMES(Packing, "stream", "documents");

struct TokenizerConfig {
  TokenizerType type = TokenizerType::byte;
  std::string path;
  std::string end_of_document;

  template <class V>
  void fields(V& f) {
    f("type", type,
      "byte: 256 bytes and <|endoftext|> = 256; sentencepiece: a .model file; bpe: a tokenizer.json of "
      "Hugging "
      "Face with byte-level BPE");
    f("path", path, "tokenizer file, relative to the configuration file that names it");
    f("end_of_document", end_of_document,
      "bpe: the token that ends a document; empty: <|endoftext|>, <|end_of_text|>, </s> or <eos>, the first "
      "that the file has");
  }
};

struct DataSource {
  std::string name;
  std::string path;
  double weight = 1.0;

  template <class V>
  void fields(V& f) {
    f("name", name, "name of the source in logs");
    f("path", path,
      "PREFIX of PREFIX.bin/.idx, or a glob of .bin files, relative to the configuration file that names it");
    f("weight", weight,
      "relative share of the training samples; weights are normalised (unused for validation)");
  }
};

struct DataConfig {
  TokenizerConfig tokenizer;
  int64_t seq_len = 256;
  std::vector<DataSource> train;
  std::vector<DataSource> validation;
  Packing packing = Packing::stream;
  bool document_mask = false;
  bool document_positions = false;
  std::optional<int64_t> begin_token;
  bool allow_overlap = false;

  template <class V>
  void fields(V& f) {
    f("tokenizer", tokenizer, "");
    f("seq_len", seq_len, "tokens per sample");
    f("train", train, "weighted blend of token files");
    f("validation", validation, "list of validation sets; each is evaluated and reported under its name");
    f("packing", packing,
      "stream: samples are consecutive pieces of the stream of documents; documents: whole documents, of "
      "which only those longer than seq_len are cut, are packed into samples by best fit (Ding et al. 2024)");
    f("document_mask", document_mask, "tokens attend only to tokens of their own document");
    f("document_positions", document_positions,
      "positions count from the first token of the document within the sample, not from the sample's; needs "
      "document_mask");
    f("begin_token", begin_token,
      "every sample starts with this token and continues with a document from its start; null: samples are "
      "consecutive pieces of the stream of documents");
    f("allow_overlap", allow_overlap,
      "accept a validation set that shares a file or its contents with the training data");
  }
};

}  // namespace sluice
