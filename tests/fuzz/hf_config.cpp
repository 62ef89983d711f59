// config.json of a folder of weights, and whether the function that it describes can be compared with a
// configuration's.
#include <nlohmann/json.hpp>

#include "config/model_function.h"
#include "hf/config.h"
#include "support/fuzz.h"

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::write("config.json", fuzz::text_of(data, size));
  fuzz::attempt([&] {
    const HfModel model = read_hf_config("config.json");
    function_differences(model.model, ModelConfig{});
    fuzz::expect(function_differences(model.model, model.model).empty(), "a model differs from itself");
    for (const auto& [key, spelling] : model.spelled)
      fuzz::expect(key.starts_with("model."), "a key of the model has another name: " + key);
    const nlohmann::json source = nlohmann::json::parse(data, data + size);
    fuzz::expect(source.is_object() && source.contains("model_type"),
                 "an object without model_type was accepted");
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::mutated_json(text, most, random))
