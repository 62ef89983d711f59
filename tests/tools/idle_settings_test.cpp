// Settings without effect are a warning of `sluice train` and of `sluice plan`.
#include "tools/tiny_run.h"

namespace sluice::test {

TEST_CASE("train and plan warn of settings without effect", "[idle]") {
  const TinyRun t;
  t.write_config("eval: {shots: 5}\n");
  const std::string shots = "tiny.yaml:19:8: eval.shots has no effect while eval.tasks names no file",
                    muon = "command line: optimizer.muon.lr has no effect while optimizer.type is adamw";
  const std::vector<std::string> more = {"optimizer.muon.lr=0.3"};
  const Outcome trained = t.train(more);
  INFO(trained.out << trained.err);
  CHECK(trained.code == 0);
  const std::string console = io::read_file(t.run + "/console.log");
  for (const std::string& text : {shots, muon}) {
    CHECK(count_of(trained.out + trained.err, text) == 1);
    CHECK(count_of(console, text) == 1);
  }

  const Outcome plan = t.sluice({"plan", t.config, more[0]});
  CHECK_THAT(plan.out, Catch::Contains("\nwarnings\n") && Catch::Contains(shots + "\n") &&
                           Catch::Contains("\n  " + muon + "\n"));
  const auto json = nlohmann::json::parse(t.sluice({"plan", t.config, more[0], "--json"}).out);
  REQUIRE(json.at("warnings").size() == 2);
  CHECK(json.at("warnings")[0] == muon);
  CHECK_THAT(json.at("warnings")[1].get<std::string>(), Catch::Contains(shots));

  t.write_config("");
  CHECK(nlohmann::json::parse(t.sluice({"plan", t.config, "--json"}).out).at("warnings").empty());
  CHECK_THAT(t.sluice({"plan", t.config}).out, !Catch::Contains("warnings"));
}

}  // namespace sluice::test
