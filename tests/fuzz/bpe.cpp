// tokenizer.json files of other programs: what is accepted encodes texts, with ids of the vocabulary, and
// decodes what it has encoded. And as part of a folder: which tokens begin and end its texts.
#include "data/bpe.h"

#include <algorithm>

#include "hf/folder_tokenizer.h"
#include "support/fuzz.h"

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::write("tokenizer.json", fuzz::text_of(data, size));
  fuzz::attempt([&] {
    HfModel model;
    model.format = HfFormat::llama;
    model.end_token = 0;
    folder_begin_token(".", model);
    folder_tokenizer(".", model);
  });
  fuzz::attempt([&] {
    const auto tokenizer = make_bpe_tokenizer("tokenizer.json");
    fuzz::expect(!tokenizer->token_name(tokenizer->end_of_document()).empty(),
                 "a token without a name ends documents");
    for (const std::string text :
         {"don't  stop\n\n 1234 <|endoftext|> e\xcc\x81", "\xff\xe4\xbd\xa0 \xed\x95\x9c\t"})
      for (const auto& ids : {tokenizer->encode(text), tokenizer->encode_with_special(text)}) {
        const bool known = std::all_of(ids.begin(), ids.end(),
                                       [&](int32_t id) { return id >= 0 && id < tokenizer->vocab_size(); });
        fuzz::expect(known, "a token is outside the vocabulary");
        fuzz::must("what was encoded cannot be decoded", [&] {
          tokenizer->decode(ids);
          tokenizer->lost_bytes(text, ids);
        });
      }
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::mutated_json(text, most, random))
