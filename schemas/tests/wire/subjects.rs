//! Subjects: what is built is parsed back, and nothing else is parsed.

use proptest::prelude::*;
use stagebus_schemas::ids::{
    CoordinatorId, Epoch, ModelName, RequestId, SessionId, StageIndex, StepNumber, WorkerId,
};
use stagebus_schemas::subjects::{LostStep, Subject, Subjects, UnheardEvent};

/// The broker's limit for a subject with its protocol line.
const MAX_SUBJECT_BYTES: usize = 1024;

const TOKEN: &str = "[a-zA-Z0-9_-]{1,64}";

fn subjects() -> Subjects {
    Subjects::new(&ModelName::new("m1").expect("a name"))
}

proptest! {
    #[test]
    fn built_subjects_parse_to_what_they_were_built_from(
        texts in (TOKEN, TOKEN, TOKEN, TOKEN),
        numbers in any::<(u64, u32, u32, u16)>(),
    ) {
        let (model, worker, coordinator, request) = texts;
        let subjects = Subjects::new(&ModelName::new(model).expect("a token"));
        let worker = WorkerId::new(worker).expect("a token");
        let coordinator = CoordinatorId::new(coordinator).expect("a token");
        let request = RequestId::new(request).expect("a token");
        let stage = StageIndex::new(numbers.3);
        let lost = LostStep {
            session: SessionId::from_u64(numbers.0),
            epoch: Epoch::new(numbers.1),
            step: StepNumber::new(numbers.2),
            stage,
        };
        let unheard = UnheardEvent { client: numbers.0, event: u64::from(numbers.1) };
        let built = [
            (subjects.prompt(), Subject::Prompt),
            (subjects.probe(), Subject::Probe),
            (subjects.job(), Subject::Job),
            (subjects.result(&request), Subject::Result(request.clone())),
            (subjects.cancel(&request), Subject::Cancel(request)),
            (subjects.step(stage, &worker), Subject::Step(stage, worker.clone())),
            (subjects.bulk(stage, &worker), Subject::Bulk(stage, worker.clone())),
            (subjects.control(stage, &worker), Subject::Control(stage, worker.clone())),
            (subjects.worker(stage, &worker), Subject::Worker(stage, worker.clone())),
            (subjects.head(&coordinator), Subject::Head(coordinator.clone())),
            (subjects.coordinator(&coordinator), Subject::Coordinator(coordinator.clone())),
            (
                subjects.unheard(&coordinator, unheard),
                Subject::Unheard(coordinator.clone(), unheard),
            ),
            (subjects.lost(&coordinator, &lost), Subject::Lost(coordinator, lost)),
        ];
        for (text, subject) in built {
            prop_assert_eq!(subjects.parse(&text), Ok(subject));
            prop_assert!(text.len() < MAX_SUBJECT_BYTES);
            prop_assert_eq!(Subjects::of(&text), Ok(subjects.clone()));
        }
    }

    #[test]
    fn any_text_is_survived(text in ".{0,80}") {
        prop_assert!(subjects().parse(&text).is_err());
        drop(subjects().parse(&format!("stagebus.v1.m1.{text}")));
    }
}

#[test]
fn what_is_parsed_is_written_in_one_way_only() {
    let good = "stagebus.v1.m1.lost.c.0123456789abcdef.1.2.3";
    assert!(subjects().parse(good).is_ok());
    let bad = [
        "",
        "stagebus.v1.m1",
        "stagebus.v1.m1.",
        "stagebus.v1.m2.prompt",
        "stagebus.v1.m11.prompt",
        "stagebus.v2.m1.prompt",
        "stagebus.v1.m1.prompt.x",
        "stagebus.v1.m1..prompt",
        " stagebus.v1.m1.prompt",
        "stagebus.v1.m1.Prompt",
        "stagebus.v1.m1.cancel",
        "stagebus.v1.m1.cancel.",
        "stagebus.v1.m1.cancel.*",
        "stagebus.v1.m1.cancel.>",
        "stagebus.v1.m1.cancel.a b",
        "stagebus.v1.m1.stage.0.w.step.x",
        "stagebus.v1.m1.stage.0..step",
        "stagebus.v1.m1.stage.00.w.step",
        "stagebus.v1.m1.stage.+1.w.step",
        "stagebus.v1.m1.stage.-1.w.step",
        "stagebus.v1.m1.stage.65536.w.step",
        "stagebus.v1.m1.stage.x.w.step",
        "stagebus.v1.m1.stage.*.w.step",
        "stagebus.v1.m1.fleet.>",
        "stagebus.v1.m1.lost.c.0123456789ABCDEF.1.2.3",
        "stagebus.v1.m1.lost.c.+123456789abcdef.1.2.3",
        "stagebus.v1.m1.lost.c.123.1.2.3",
        "stagebus.v1.m1.lost.c.00123456789abcdef.1.2.3",
        "stagebus.v1.m1.lost.c.0123456789abcdef.01.2.3",
        "stagebus.v1.m1.lost.c.0123456789abcdef.1.4294967296.3",
    ];
    for text in bad {
        assert!(subjects().parse(text).is_err(), "{text}");
    }
    let long = format!("stagebus.v1.m1.cancel.{}", "a".repeat(65));
    assert!(subjects().parse(&long).is_err());
}
