// tokenizer.json files of other programs: what is accepted encodes texts, with ids of the vocabulary, and
// decodes what it has encoded.
#include "data/bpe.h"

#include <algorithm>

#include "support/fuzz.h"

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::write("tokenizer.json", fuzz::text_of(data, size));
  fuzz::attempt([&] {
    const auto tokenizer = make_bpe_tokenizer("tokenizer.json");
    for (const std::string text :
         {"don't  stop\n\n 1234 <|endoftext|> e\xcc\x81", "\xff\xe4\xbd\xa0 \xed\x95\x9c\t"})
      for (const auto& ids : {tokenizer->encode(text), tokenizer->encode_with_special(text)}) {
        const bool known = std::all_of(ids.begin(), ids.end(),
                                       [&](int32_t id) { return id >= 0 && id < tokenizer->vocab_size(); });
        fuzz::expect(known, "a token is outside the vocabulary");
        tokenizer->decode(ids);
        tokenizer->lost_bytes(text, ids);
      }
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::mutated_json(text, most, random))
