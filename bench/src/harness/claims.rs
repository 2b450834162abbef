//! Claims: figures with a target, and whether they hold.

use serde::Serialize;

use super::table::table;

/// Which side of the target is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The value must be the target or more.
    AtLeast,
    /// The value must be the target or less.
    AtMost,
}

/// A figure that a scenario is to reach.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Target {
    /// Name, in snake case with the unit at the end.
    pub name: &'static str,
    /// The target.
    pub target: f64,
    /// Which side of it is good.
    pub bound: Bound,
    /// What is measured.
    pub what: &'static str,
}

/// A target with what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Claim {
    /// Name of the target.
    pub name: &'static str,
    /// The measured value; absent if it could not be measured.
    pub value: Option<f64>,
    /// The target.
    pub target: f64,
    /// Whether the value is on the good side; absent if there is no value.
    pub holds: Option<bool>,
    /// How the value was measured, or what is missing.
    pub how: String,
}

impl Target {
    /// The claim for a measured value.
    #[must_use]
    pub fn measured(&self, value: f64, how: impl Into<String>) -> Claim {
        let holds = match self.bound {
            Bound::AtLeast => value >= self.target,
            Bound::AtMost => value <= self.target,
        };
        let (name, target) = (self.name, self.target);
        Claim { name, value: Some(value), target, holds: Some(holds), how: how.into() }
    }

    /// The claim for a value that could not be measured, with what is missing.
    #[must_use]
    pub fn missing(&self, why: impl Into<String>) -> Claim {
        Claim { name: self.name, value: None, target: self.target, holds: None, how: why.into() }
    }

    /// The target with its side, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let side = match self.bound {
            Bound::AtLeast => ">=",
            Bound::AtMost => "<=",
        };
        format!("{side} {}", self.target)
    }
}

/// A scenario, for lists and for runs of all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Listed {
    /// Its subcommand.
    pub name: &'static str,
    /// Its claims.
    pub claims: &'static [Target],
    /// The options of a short run.
    pub quick: &'static [&'static str],
}

/// Lists the targets of scenarios, as text or as one JSON object.
///
/// # Errors
/// None in practice: the values are plain.
pub fn list(scenarios: &[Listed], json: bool) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Row<'a> {
        scenario: &'a str,
        #[serde(flatten)]
        target: &'a Target,
    }
    let rows = scenarios
        .iter()
        .flat_map(|listed| listed.claims.iter().map(move |target| (listed.name, target)));
    if json {
        let claims: Vec<_> = rows.map(|(scenario, target)| Row { scenario, target }).collect();
        return Ok(format!("{}\n", serde_json::json!({ "claims": claims })));
    }
    let rows: Vec<Vec<String>> = rows
        .map(|(scenario, target)| {
            vec![
                scenario.to_owned(),
                target.name.to_owned(),
                target.describe(),
                target.what.to_owned(),
            ]
        })
        .collect();
    Ok(table(&["scenario", "claim", "target", "what"], &rows))
}

/// Lays out claims for people; `targets` gives the sides.
#[must_use]
pub fn describe(claims: &[Claim], targets: &[Target]) -> String {
    let rows: Vec<Vec<String>> = claims
        .iter()
        .map(|claim| {
            let target = targets.iter().find(|target| target.name == claim.name);
            let holds = match claim.holds {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "not measured",
            };
            vec![
                claim.name.to_owned(),
                claim.value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}")),
                target.map_or_else(|| claim.target.to_string(), Target::describe),
                holds.to_owned(),
                claim.how.clone(),
            ]
        })
        .collect();
    table(&["claim", "value", "target", "holds", "how"], &rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SPEED: Target =
        Target { name: "speed", target: 0.97, bound: Bound::AtLeast, what: "how fast" };
    const COST: Target =
        Target { name: "cost_ms", target: 0.5, bound: Bound::AtMost, what: "cost" };

    #[test]
    fn a_claim_has_the_documented_form() {
        let value = serde_json::to_value(SPEED.measured(1.25, "side by side")).expect("JSON");
        let expected = json!({
            "name": "speed", "value": 1.25, "target": 0.97, "holds": true, "how": "side by side"
        });
        assert_eq!(value, expected);
        let value = serde_json::to_value(COST.missing("no rival here")).expect("JSON");
        let expected = json!({
            "name": "cost_ms", "value": null, "target": 0.5, "holds": null, "how": "no rival here"
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn the_bound_decides_which_side_is_good() {
        assert_eq!(SPEED.measured(0.97, "").holds, Some(true));
        assert_eq!(SPEED.measured(0.96, "").holds, Some(false));
        assert_eq!(COST.measured(0.5, "").holds, Some(true));
        assert_eq!(COST.measured(0.51, "").holds, Some(false));
    }

    #[test]
    fn the_list_names_every_claim_with_its_scenario() {
        let all = [Listed { name: "parity", claims: &[SPEED, COST], quick: &[] }];
        let text = list(&all, false).expect("text");
        assert!(text.contains("parity    speed    >= 0.97"), "{text}");
        let json: serde_json::Value =
            serde_json::from_str(&list(&all, true).expect("JSON")).expect("one object");
        assert_eq!(json["claims"][1]["name"], "cost_ms");
        assert_eq!(json["claims"][1]["bound"], "at_most");
    }

    #[test]
    fn people_see_what_is_not_measured() {
        let text = describe(&[COST.missing("no rival here")], &[COST]);
        assert!(text.contains("cost_ms  -      <= 0.5  not measured  no rival here"), "{text}");
    }
}
