//! The plan for people and for programs.

use serde::Serialize;
use stagebus_plan::{Layout, LinkTimes, Plan, Question, TokenParts};
use stagebus_schemas::ids::ModelName;

use super::apply::{Applied, Command};
use super::ask::Measured;
use crate::console::table;

/// A plan and everything that it follows from.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) model: ModelName,
    pub(super) nodes: Vec<Measured>,
    pub(super) question: Question,
    pub(super) plan: Plan,
}

/// What `stagebus plan --json` prints.
#[derive(Debug, Serialize)]
pub(super) struct PlanJson<'a> {
    model: &'a ModelName,
    layers: usize,
    sessions: usize,
    context: usize,
    nodes: Vec<NodeJson<'a>>,
    links: &'a LinkTimes,
    chosen: LayoutJson<'a>,
    why: String,
    /// The best layout of every number of stages that fits, the chosen one among them.
    layouts: Vec<LayoutJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    applied: Option<AppliedJson<'a>>,
}

#[derive(Debug, Serialize)]
struct NodeJson<'a> {
    name: &'a str,
    host: &'a str,
    cores: u32,
    threads: u32,
    engine: &'a str,
    profile: &'a str,
    memory_bytes: u64,
    /// What a stage may take.
    room_bytes: u64,
    handoff_ms: f64,
    devices: &'a [stagebus_plan::DeviceCosts],
    left_out: Vec<LeftOutJson<'a>>,
}

#[derive(Debug, Serialize)]
struct LeftOutJson<'a> {
    device: &'a str,
    why: &'a str,
}

#[derive(Debug, Serialize)]
struct LayoutJson<'a> {
    stages: Vec<StageJson<'a>>,
    split: Vec<usize>,
    coordinator: &'a str,
    token_ms: f64,
    parts: TokenParts,
    tok_s: f64,
}

#[derive(Debug, Serialize)]
struct StageJson<'a> {
    stage: usize,
    node: &'a str,
    device: &'a str,
    first_layer: usize,
    end_layer: usize,
    pass_ms: f64,
    memory_bytes: u64,
}

#[derive(Debug, Serialize)]
struct AppliedJson<'a> {
    dir: &'a std::path::Path,
    commands: &'a [Command],
}

impl Report {
    pub(super) fn new(
        model: ModelName,
        nodes: Vec<Measured>,
        question: Question,
        plan: Plan,
    ) -> Self {
        Self { model, nodes, question, plan }
    }

    /// The chosen layout.
    pub(super) fn layout(&self) -> &Layout {
        self.plan.layout()
    }

    /// The node with this index.
    pub(super) fn node(&self, index: usize) -> &str {
        &self.question.nodes[index].name
    }

    /// A device of a node.
    pub(super) fn device(&self, node: usize, device: usize) -> &str {
        &self.question.nodes[node].devices[device].device
    }

    /// The object for programs.
    pub(super) fn with<'a>(&'a self, applied: Option<&'a Applied>) -> PlanJson<'a> {
        PlanJson {
            model: &self.model,
            layers: self.question.model.n_layers(),
            sessions: self.question.wish.sessions,
            context: self.question.wish.context,
            nodes: self.nodes.iter().zip(0..).map(|(node, at)| self.node_json(node, at)).collect(),
            links: &self.question.links,
            chosen: self.layout_json(self.layout()),
            why: self.plan.reason.to_string(),
            layouts: self.plan.layouts.iter().map(|layout| self.layout_json(layout)).collect(),
            applied: applied
                .map(|applied| AppliedJson { dir: &applied.dir, commands: &applied.commands }),
        }
    }

    fn node_json<'a>(&'a self, node: &'a Measured, at: usize) -> NodeJson<'a> {
        let facts = &self.question.nodes[at];
        let left_out = node.failures().map(|(device, why)| LeftOutJson { device, why });
        NodeJson {
            name: &facts.name,
            host: &node.about.host,
            cores: node.about.n_cores,
            threads: node.about.threads,
            engine: &node.about.engine,
            profile: &node.about.profile,
            memory_bytes: node.about.memory_bytes,
            room_bytes: facts.memory_bytes,
            handoff_ms: facts.handoff_ms,
            devices: &facts.devices,
            left_out: left_out.collect(),
        }
    }

    fn layout_json<'a>(&'a self, layout: &'a Layout) -> LayoutJson<'a> {
        let stage = |(stage, placed): (usize, &'a stagebus_plan::Placed)| StageJson {
            stage,
            node: self.node(placed.node),
            device: self.device(placed.node, placed.device),
            first_layer: placed.layers.start,
            end_layer: placed.layers.end,
            pass_ms: placed.pass_ms,
            memory_bytes: placed.memory_bytes,
        };
        let coordinator = layout.stages.first().map_or("", |first| self.node(first.node));
        LayoutJson {
            stages: layout.stages.iter().enumerate().map(stage).collect(),
            split: layout.split(),
            coordinator,
            token_ms: layout.token_ms,
            parts: layout.parts,
            tok_s: layout.tok_s,
        }
    }

    /// The text for people.
    pub(super) fn describe(&self) -> String {
        let wish = &self.question.wish;
        let layout = self.layout();
        let first = layout.stages.first().map_or("", |first| self.node(first.node));
        let TokenParts { passes_ms, links_ms, handoffs_ms } = layout.parts;
        let left_out: String = self
            .nodes
            .iter()
            .flat_map(|node| node.failures().map(move |failure| (node, failure)))
            .map(|(node, (device, why))| format!("{device} of {} is left out: {why}\n", node.name))
            .collect();
        format!(
            "{}: {} layers, for {} session{} of up to {} tokens\n\n{}{left_out}{}\n{}\n\
             {}\nthe coordinator is on {first} and hosts the first stage\n\
             a token of a lone session: {passes_ms:.2} ms in the stages, {links_ms:.2} ms on the way \
             between machines, {handoffs_ms:.2} ms within processes\n",
            self.model,
            self.question.model.n_layers(),
            wish.sessions,
            if wish.sessions == 1 { "" } else { "s" },
            wish.context,
            self.nodes_table(),
            self.links_table(),
            self.layouts_table(),
            self.plan.reason,
        )
    }

    fn nodes_table(&self) -> String {
        let header = [
            "node",
            "device",
            "room MiB",
            "layer ms",
            "head ms",
            "call ms",
            "rested: layer ms",
            "8 rows: layer ms",
        ];
        let mut rows = Vec::new();
        for node in &self.question.nodes {
            for device in &node.devices {
                rows.push(vec![
                    node.name.clone(),
                    device.device.clone(),
                    (node.memory_bytes >> 20).to_string(),
                    format!("{:.3}", device.layer.one_ms),
                    format!("{:.3}", device.head.one_ms),
                    format!("{:.3}", device.call.one_ms),
                    format!("{:.3}", device.layer.rested_ms),
                    format!("{:.3}", device.layer.many_ms),
                ]);
            }
        }
        table(&header, &rows)
    }

    /// One way between every two nodes; nothing for a lone one.
    fn links_table(&self) -> String {
        let nodes = &self.question.nodes;
        let mut rows = Vec::new();
        for (from, node) in nodes.iter().enumerate() {
            for (to, other) in nodes.iter().enumerate().skip(from + 1) {
                rows.push(vec![
                    format!("{} - {}", node.name, other.name),
                    format!("{:.3}", self.question.links.hidden_ms[from][to]),
                    format!("{:.3}", self.question.links.token_ms[from][to]),
                ]);
            }
        }
        match rows.is_empty() {
            true => String::new(),
            false => {
                let header = ["between", "hidden state ms", "token ms"];
                format!("\n{}", table(&header, &rows))
            }
        }
    }

    fn layouts_table(&self) -> String {
        let header = ["stages", "ms a token", "tokens/s", "where", ""];
        let row = |(at, layout): (usize, &Layout)| {
            let place = |placed: &stagebus_plan::Placed| {
                format!(
                    "{} {} {}..{}",
                    self.node(placed.node),
                    self.device(placed.node, placed.device),
                    placed.layers.start,
                    placed.layers.end
                )
            };
            let places: Vec<String> = layout.stages.iter().map(place).collect();
            let mark = if at == self.plan.chosen { "<- chosen" } else { "" };
            vec![
                layout.stages.len().to_string(),
                format!("{:.2}", layout.token_ms),
                format!("{:.1}", layout.tok_s),
                places.join(", "),
                mark.to_owned(),
            ]
        };
        let rows: Vec<Vec<String>> = self.plan.layouts.iter().enumerate().map(row).collect();
        table(&header, &rows)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use stagebus_plan::Wish;

    use super::*;
    use crate::plan::facts::{self, tests as measured};

    /// A report on two nodes with room for everything.
    pub(in crate::plan) fn report(stages: Option<usize>) -> Report {
        let nodes = vec![measured::node("a", "h", 1 << 40), measured::node("b", "i", 1 << 40)];
        let manifest = measured::probe();
        let ways = vec![vec![1.5; 2]; 2];
        let question = Question {
            model: facts::model(&manifest).expect("a probe"),
            nodes: facts::nodes(&nodes, &manifest).expect("measurements"),
            links: LinkTimes { hidden_ms: ways.clone(), token_ms: ways },
            wish: Wish { sessions: 1, context: 4096, stages },
        };
        let plan = stagebus_plan::plan(&question).expect("it fits");
        Report::new("m-1".parse().expect("a name"), nodes, question, plan)
    }

    #[test]
    fn people_see_measurements_choice_and_reason() {
        let text = report(None).describe();
        for part in [
            "m-1: 6 layers, for 1 session of up to 4096 tokens",
            "GPU of a is left out: no such device",
            "a - b ",
            " 1.500",
            "a CPU 0..6",
            "<- chosen",
            "more nodes would be slower",
            "the coordinator is on a",
            "18.00 ms in the stages, 0.00 ms on the way",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
    }

    #[test]
    fn programs_get_the_same() {
        let report = report(Some(2));
        let json = serde_json::to_value(report.with(None)).expect("it can be represented");
        assert_eq!(json["chosen"]["stages"][1]["end_layer"], 6);
        assert_eq!(json["chosen"]["coordinator"], json["chosen"]["stages"][0]["node"]);
        assert_eq!(json["layouts"].as_array().map(Vec::len), Some(1));
        assert_eq!(json["nodes"][0]["left_out"][0]["device"], "GPU");
        assert_eq!(json["why"], "as many stages as asked for");
        let ms = json["chosen"]["token_ms"].as_f64().expect("a number");
        // A call of 1 ms more, everything twice after rests, two ways of 1.5 ms, three hand-offs of
        // 0.05 ms.
        assert!((ms - (2.0 * 19.0 + 3.0 + 0.15)).abs() < 1e-9, "{json:#}");
    }
}
