// Configurations and other YAML as JSON, which scripts read.
#include "config/json.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "config/load.h"
#include "config/scratch.h"
#include "core/error.h"

using namespace sluice;
using nlohmann::json;

TEST_CASE("a resolved configuration as JSON holds what its YAML holds", "[json]") {
  const test::ScratchFolder scratch;
  Config config;
  config.name = "one";
  config.run_dir = "runs/one";
  config.model.branch_clip = 300;
  config.model.attention.gates.resize(2);
  config.data.train = {{"a", "/data/a, b", 0.25}};
  scratch.write("resolved.yaml", to_yaml(config));
  const json written = json::parse(to_json(config)),
             read = json::parse(yaml_file_to_json("resolved.yaml", false));
  CHECK(written == read);
  CHECK(written["model"]["attention"]["gates"][1]["position"] == "sdpa_output");
  CHECK(written["data"]["train"] == json::parse(R"([{"name": "a", "path": "/data/a, b", "weight": 0.25}])"));
  CHECK(written["model"]["branch_clip"] == 300);
  CHECK(written["train"]["seed"].is_number_integer());
  config.model.branch_clip.reset();
  CHECK(json::parse(to_json(config))["model"]["branch_clip"].is_null());
}

TEST_CASE("scalars of YAML become what they are written as", "[json]") {
  const test::ScratchFolder scratch;
  scratch.write("a.yaml",
                "numbers: [1, -2, 3e-4, 4.0, 12345678901234567890]\n"
                "words: ['1', \"true\", 010, yes, nan, 20B, a b]\n"
                "others: [true, false, null, ~, '']\n"
                "empty:\n");
  CHECK(yaml_file_to_json("a.yaml", false) == R"({"numbers":[1,-2,0.0003,4.0,1.2345678901234567e+19],)"
                                              R"("words":["1","true","010","yes","nan","20B","a b"],)"
                                              R"("others":[true,false,null,null,""],"empty":null})");
  scratch.write("b.yaml", "");
  CHECK(yaml_file_to_json("b.yaml", false) == "null");
}

TEST_CASE("values keep their places and their letters where that is asked for", "[json]") {
  const test::ScratchFolder scratch;
  scratch.write("a.yaml", "lr: 1e-3\nlist:\n  - {a: '2'}\nnothing:\n");
  const json root = json::parse(yaml_file_to_json("a.yaml", true));
  CHECK(root["kind"] == "map");
  CHECK(root["keys"] == json::parse(R"(["lr", "list", "nothing"])"));
  CHECK(root["items"][0] ==
        json::parse(R"({"kind": "scalar", "line": 1, "column": 5, "text": "1e-3", "quoted": false})"));
  const json& item = root["items"][1]["items"][0];
  CHECK(item["kind"] == "map");
  CHECK((item["line"] == 3 && item["column"] == 5));
  CHECK(item["items"][0] ==
        json::parse(R"({"kind": "scalar", "line": 3, "column": 9, "text": "2", "quoted": true})"));
  CHECK(root["items"][2] == json::parse(R"({"kind": "null", "line": 4, "column": 1})"));
}

TEST_CASE("YAML that cannot be read is refused by line, as a configuration is", "[json]") {
  const test::ScratchFolder scratch;
  const auto refusal = [&](const std::string& text) -> std::string {
    scratch.write("a.yaml", text);
    try {
      return "read as " + yaml_file_to_json("a.yaml", false);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return error.what();
    }
  };
  CHECK_THAT(refusal("a: 1\nb: &c 2\n"), Catch::Contains("a.yaml:2:4: anchors (&name) are not allowed"));
  CHECK_THAT(refusal("a: 1\na: 2\n"), Catch::Contains("a.yaml:2:1: duplicate key a"));
  CHECK_THAT(refusal("a: {b 1}\n"), Catch::Contains("a.yaml:1:5: b 1 has no value; is a colon missing?"));
  CHECK_THAT(refusal("a: [1\n"), Catch::Contains("not valid YAML"));
  CHECK_THROWS_AS(yaml_file_to_json("none.yaml", false), Error);
}
