//! Who may use which subjects: the four roles, as the broker's permissions state them.
//!
//! | role | publishes | hears |
//! |---|---|---|
//! | client | `prompt`, `job`, `cancel`, `probe`; if it may, JetStream's requests for results | announcements, its own inbox |
//! | coordinator | steps, control, announcements of coordinators, answers to clients, `result`, JetStream's requests for its model's streams and to read its shard sets, those of its draft models too | `prompt`, `cancel`, `head`, `lost`, `unheard`, `probe`, announcements, the inbox of its model's coordinators |
//! | worker | steps and their parts, `head`, `lost`, announcements of workers, `probe`, answers to coordinators and operators, questions to nodes, JetStream's requests to read its model's shard sets | steps and their parts, control, `lost`, `probe`, announcements, questions to nodes, the inbox of its model's workers |
//! | operator | control, `probe`, questions to nodes, shard sets, JetStream's requests to store, read and remove them | announcements, its own inbox |
//!
//! A node, which is measured for a plan, has a worker's key; its operator asks it, and nodes ask each
//! other to measure the ways between them.
//!
//! Coordinators and workers act for one model. Answers to a client go to an inbox that carries the
//! client's name (with an nkey, its public key), so no client hears another's.

use crate::ids::{ClientName, ModelName};
use crate::store::Bucket;
use crate::subjects::{Subjects, nodes};

/// The consumer of a job queue that all coordinators of its model share.
pub const JOB_CONSUMER: &str = "coordinators";

/// First token of all subjects for answers.
const INBOX: &str = "_INBOX";

/// Who connects, and for which model. Each role has a prefix of its own for answers, which the
/// broker's permissions allow to it alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role<'a> {
    /// Sends requests.
    Client,
    /// Drives the sessions of a model.
    Coordinator(&'a ModelName),
    /// Runs a stage of a model.
    Worker(&'a ModelName),
    /// Looks after the workers.
    Operator,
}

impl Role<'_> {
    /// Returns the prefix of the subjects for answers to this role. A client or operator without a
    /// name shares it with all others, which only a broker without credentials should have.
    #[must_use]
    pub fn inbox_prefix(self, name: Option<&ClientName>) -> String {
        match (self, name) {
            (Self::Client, Some(name)) => format!("{INBOX}.client.{name}"),
            (Self::Client, None) => format!("{INBOX}.client"),
            (Self::Coordinator(model), _) => format!("{INBOX}.coordinator.{model}"),
            (Self::Worker(model), _) => format!("{INBOX}.worker.{model}"),
            (Self::Operator, Some(name)) => format!("{INBOX}.operator.{name}"),
            (Self::Operator, None) => format!("{INBOX}.operator"),
        }
    }
}

/// Subjects that a role may use; everything else is forbidden.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Permissions {
    /// Subjects on which it may publish.
    pub publish: Vec<String>,
    /// Subjects on which it may not publish although `publish` covers them.
    pub publish_denied: Vec<String>,
    /// Subjects to which it may subscribe.
    pub subscribe: Vec<String>,
}

impl Permissions {
    /// What a client may do for some models; for all models if none is named. With `results` also
    /// read the events of durable requests: its own and those of all other clients, since the
    /// broker keeps them without the name of who asked.
    #[must_use]
    pub fn client(name: &ClientName, models: &[ModelName], results: bool) -> Self {
        let mut permissions = Self::default();
        for subjects in scopes(models) {
            permissions.publish.extend([
                subjects.prompt(),
                subjects.job(),
                subjects.cancel_all(),
                subjects.probe(),
            ]);
            permissions.subscribe.push(subjects.fleet_all());
        }
        permissions.subscribe.push(below(&Role::Client.inbox_prefix(Some(name))));
        if results {
            permissions.publish.extend(result_requests(models));
            // Through it the queue hands out its jobs, with what other clients ask.
            let verbs = ["MSG.NEXT", "DELETE"];
            let queue = verbs.map(|verb| format!("$JS.API.CONSUMER.{verb}.*.{JOB_CONSUMER}"));
            permissions.publish_denied.extend(queue);
        }
        permissions
    }

    /// What an operator may do with the workers of some models; of all models if none is named.
    /// Shard sets may be stored, read and removed for the models in `stored` only: whoever may make a
    /// stream of any name could listen to everything.
    #[must_use]
    pub fn operator(name: &ClientName, models: &[ModelName], stored: &[ModelName]) -> Self {
        let mut permissions = Self::default();
        // Names of streams, to find the models that are stored.
        permissions.publish.push("$JS.API.STREAM.NAMES".to_owned());
        let buckets = [Bucket::of, Bucket::of_drafts, Bucket::of_probe];
        for bucket in stored.iter().flat_map(|model| buckets.map(|of| of(model))) {
            permissions.publish.extend(read_requests(&bucket));
            permissions.publish.push(bucket.all());
            let verbs = ["CREATE", "PURGE", "DELETE"].map(|verb| stream_request(verb, &bucket));
            permissions.publish.extend(verbs);
        }
        for subjects in scopes(models) {
            permissions.publish.extend([subjects.control_all(), subjects.probe()]);
            permissions.subscribe.push(subjects.fleet_all());
        }
        permissions.publish.extend([nodes::CALL.to_owned(), nodes::ASK_ANY.to_owned()]);
        permissions.subscribe.push(below(&Role::Operator.inbox_prefix(Some(name))));
        permissions
    }

    /// What a coordinator of a model may do.
    #[must_use]
    pub fn coordinator(model: &ModelName) -> Self {
        let subjects = Subjects::new(model);
        let inbox = below(&Role::Coordinator(model).inbox_prefix(None));
        let own = [
            subjects.step_all(),
            subjects.control_all(),
            subjects.coordinator_all(),
            subjects.probe(),
            subjects.result_all(),
            below(&Role::Client.inbox_prefix(None)),
            inbox.clone(),
        ];
        Self {
            publish: own
                .into_iter()
                .chain(stream_requests(&subjects))
                .chain(read_requests(&Bucket::of(model)))
                .chain(read_requests(&Bucket::of_drafts(model)))
                .collect(),
            publish_denied: Vec::new(),
            subscribe: vec![
                subjects.prompt(),
                subjects.cancel_all(),
                subjects.head_all(),
                subjects.lost_any(),
                subjects.unheard_any(),
                subjects.fleet_all(),
                subjects.probe(),
                inbox,
            ],
        }
    }

    /// What a worker of a model may do.
    #[must_use]
    pub fn worker(model: &ModelName) -> Self {
        let subjects = Subjects::new(model);
        let inbox = below(&Role::Worker(model).inbox_prefix(None));
        let own = [
            subjects.step_all(),
            subjects.bulk_all(),
            subjects.head_all(),
            subjects.lost_any(),
            subjects.worker_all(),
            subjects.probe(),
            below(&Role::Coordinator(model).inbox_prefix(None)),
            below(&Role::Operator.inbox_prefix(None)),
            inbox.clone(),
            nodes::ASK_ANY.to_owned(),
        ];
        Self {
            publish: own
                .into_iter()
                .chain(read_requests(&Bucket::of(model)))
                .chain(read_requests(&Bucket::of_probe(model)))
                .collect(),
            // The pattern of workers' announcements covers those of coordinators.
            publish_denied: vec![subjects.coordinator_all()],
            subscribe: vec![
                subjects.step_all(),
                subjects.bulk_all(),
                subjects.control_all(),
                subjects.lost_any(),
                subjects.fleet_all(),
                subjects.probe(),
                inbox,
                nodes::CALL.to_owned(),
                nodes::ASK_ANY.to_owned(),
            ],
        }
    }
}

/// Whether events may be sent to a reply subject that a client chose. The coordinator sends them
/// with its own rights: on an internal subject, on one of the broker's own or in the inbox of
/// another role they would act for the client.
#[must_use]
pub fn is_answerable(reply: &str) -> bool {
    let internal = ["$", nodes::ROOT, "_INBOX.coordinator.", "_INBOX.worker.", "_INBOX.operator."];
    Subjects::of(reply).is_err() && !internal.iter().any(|prefix| reply.starts_with(prefix))
}

/// JetStream's requests that keep a model's durable jobs: its two streams, the consumer of the
/// queue, and readers of results.
fn stream_requests(subjects: &Subjects) -> Vec<String> {
    let (jobs, results) = (subjects.jobs_stream(), subjects.results_stream());
    let mut requests = vec![
        format!("$JS.ACK.{jobs}.>"),
        format!("$JS.API.STREAM.MSG.GET.{results}"),
        format!("$JS.API.CONSUMER.DELETE.{results}.*"),
    ];
    for stream in [&jobs, &results] {
        let verbs = ["INFO", "CREATE", "UPDATE"];
        requests.extend(verbs.map(|verb| format!("$JS.API.STREAM.{verb}.{stream}")));
        let verbs = ["CREATE", "MSG.NEXT"];
        requests.extend(verbs.map(|verb| format!("$JS.API.CONSUMER.{verb}.{stream}.>")));
    }
    requests
}

/// JetStream's requests that read a bucket: whether it is there, and what is in it.
fn read_requests(bucket: &Bucket) -> [String; 2] {
    let get = format!("$JS.API.DIRECT.GET.{}", bucket.stream());
    [stream_request("INFO", bucket), get]
}

fn stream_request(verb: &str, bucket: &Bucket) -> String {
    format!("$JS.API.STREAM.{verb}.{}", bucket.stream())
}

/// JetStream's requests that read results; the subject of the first one tells which.
fn result_requests(models: &[ModelName]) -> Vec<String> {
    let scopes = match models {
        [] => vec![("*".to_owned(), Subjects::any_model())],
        models => {
            let subjects = models.iter().map(Subjects::new);
            subjects.map(|subjects| (subjects.results_stream(), subjects)).collect()
        }
    };
    let requests = scopes.into_iter().flat_map(|(stream, subjects)| {
        [
            format!("$JS.API.CONSUMER.CREATE.{stream}.*.{}", subjects.result_all()),
            format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.*"),
            // A reader that lost its place makes a new one; the names are random.
            format!("$JS.API.CONSUMER.DELETE.{stream}.*"),
        ]
    });
    requests.collect()
}

/// The name of the client that a reply subject belongs to. With credentials the broker lets a
/// client hear only subjects with its own name, so whoever gives another one hears no answer.
#[must_use]
pub fn client_of(reply: &str) -> Option<&str> {
    let (name, rest) = reply.strip_prefix("_INBOX.client.")?.split_once('.')?;
    (!name.is_empty() && !rest.is_empty()).then_some(name)
}

/// The subjects of some models; those of all models if none is named.
fn scopes(models: &[ModelName]) -> Vec<Subjects> {
    match models {
        [] => vec![Subjects::any_model()],
        models => models.iter().map(Subjects::new).collect(),
    }
}

fn below(prefix: &str) -> String {
    format!("{prefix}.>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{CoordinatorId, NodeId, RequestId, StageIndex, WorkerId};
    use crate::subjects::UnheardEvent;

    fn covers(pattern: &str, subject: &str) -> bool {
        let (mut pattern, mut subject) = (pattern.split('.'), subject.split('.'));
        loop {
            match (pattern.next(), subject.next()) {
                (Some(">"), Some(_)) | (None, None) => return true,
                (Some(wanted), Some(found)) if wanted == "*" || wanted == found => {}
                _ => return false,
            }
        }
    }

    fn may(allowed: &[String], denied: &[String], subject: &str) -> bool {
        let any = |patterns: &[String]| patterns.iter().any(|pattern| covers(pattern, subject));
        any(allowed) && !any(denied)
    }

    /// Subjects of a model by what they are for.
    fn subjects_of(model: &ModelName) -> Vec<(&'static str, String)> {
        let stage = StageIndex::FIRST;
        let (worker, coordinator) = (WorkerId::random(stage), CoordinatorId::random());
        let unheard = UnheardEvent { client: 1, event: 2 };
        let (subjects, bucket) = (Subjects::new(model), Bucket::of(model));
        let (drafts, measured) = (Bucket::of_drafts(model), Bucket::of_probe(model));
        vec![
            ("prompt", subjects.prompt()),
            ("cancel", subjects.cancel(&RequestId::random())),
            ("job", subjects.job()),
            ("result", subjects.result(&RequestId::random())),
            ("acknowledge", format!("$JS.ACK.{}.x.1", subjects.jobs_stream())),
            ("read", format!("$JS.API.CONSUMER.CREATE.{}.x", subjects.results_stream())),
            ("purge", format!("$JS.API.STREAM.PURGE.{}", subjects.jobs_stream())),
            ("probe", subjects.probe()),
            ("step", subjects.step(stage, &worker)),
            ("bulk", subjects.bulk(stage, &worker)),
            ("control", subjects.control(stage, &worker)),
            ("head", subjects.head(&coordinator)),
            ("unheard", subjects.unheard(&coordinator, unheard)),
            ("fleet worker", subjects.worker(stage, &worker)),
            ("fleet coordinator", subjects.coordinator(&coordinator)),
            ("look", stream_request("INFO", &bucket)),
            ("pull", format!("$JS.API.DIRECT.GET.{}", bucket.stream())),
            ("pull draft", format!("$JS.API.DIRECT.GET.{}", drafts.stream())),
            ("pull probe", format!("$JS.API.DIRECT.GET.{}", measured.stream())),
            ("make", stream_request("CREATE", &bucket)),
            ("make", stream_request("CREATE", &measured)),
            ("make", stream_request("CREATE", &drafts)),
            ("remove", stream_request("PURGE", &bucket)),
            ("remove", stream_request("DELETE", &bucket)),
            ("remove", stream_request("DELETE", &measured)),
            ("push", bucket.parts("x")),
            ("push", bucket.info("x")),
            ("push", drafts.parts("x")),
            ("push", measured.parts("x")),
            ("update", stream_request("UPDATE", &bucket)),
            ("export", format!("$JS.API.CONSUMER.CREATE.{}.x", bucket.stream())),
        ]
    }

    #[test]
    fn every_role_may_do_its_work_and_nothing_else() {
        let (mine, other) = ("a".parse().expect("a name"), "b".parse().expect("a name"));
        let ann = ClientName::new("ANN").expect("a name");
        let roles = [
            (
                Permissions::client(&ann, std::slice::from_ref(&mine), false),
                vec!["prompt", "job", "cancel", "probe"],
                vec!["fleet worker", "fleet coordinator"],
            ),
            (
                Permissions::coordinator(&mine),
                vec![
                    "step",
                    "control",
                    "probe",
                    "fleet coordinator",
                    "result",
                    "acknowledge",
                    "read",
                    "look",
                    "pull",
                    "pull draft",
                ],
                vec![
                    "prompt",
                    "cancel",
                    "probe",
                    "head",
                    "unheard",
                    "fleet worker",
                    "fleet coordinator",
                ],
            ),
            (
                Permissions::worker(&mine),
                vec!["step", "bulk", "head", "probe", "fleet worker", "look", "pull", "pull probe"],
                vec!["step", "bulk", "control", "probe", "fleet worker", "fleet coordinator"],
            ),
            (
                Permissions::operator(
                    &ann,
                    std::slice::from_ref(&mine),
                    std::slice::from_ref(&mine),
                ),
                vec![
                    "control",
                    "probe",
                    "look",
                    "pull",
                    "pull draft",
                    "pull probe",
                    "make",
                    "remove",
                    "push",
                ],
                vec!["fleet worker", "fleet coordinator"],
            ),
        ];
        for (permissions, publishes, hears) in roles {
            let Permissions { publish, publish_denied, subscribe } = &permissions;
            for (name, subject) in subjects_of(&mine) {
                let found = may(publish, publish_denied, &subject);
                assert_eq!(found, publishes.contains(&name), "publish {subject}: {permissions:?}");
                let found = may(subscribe, &[], &subject);
                assert_eq!(found, hears.contains(&name), "subscribe {subject}: {permissions:?}");
            }
            for (_, subject) in subjects_of(&other) {
                assert!(!may(publish, publish_denied, &subject), "publish {subject}");
                assert!(!may(subscribe, &[], &subject), "subscribe {subject}");
            }
            for strange in ["$SYS.REQ.SERVER.PING", "$JS.API.INFO", "foo", "_INBOX.x.1"] {
                assert!(!may(publish, publish_denied, strange), "publish {strange}");
                assert!(!may(subscribe, &[], strange), "subscribe {strange}");
            }
        }
    }

    #[test]
    fn nodes_are_asked_by_operators_and_by_each_other() {
        let (mine, ann) = ("a".parse().expect("a name"), ClientName::new("ANN").expect("a name"));
        let ask = nodes::ask(&NodeId::random());
        let worker = Permissions::worker(&mine);
        let operator = Permissions::operator(&ann, &[], &[]);
        for (permissions, asks, calls, hears) in [
            (&worker, true, false, true),
            (&operator, true, true, false),
            (&Permissions::client(&ann, &[], true), false, false, false),
            (&Permissions::coordinator(&mine), false, false, false),
        ] {
            let Permissions { publish, publish_denied, subscribe } = permissions;
            assert_eq!(may(publish, publish_denied, &ask), asks, "{permissions:?}");
            assert_eq!(may(publish, publish_denied, nodes::CALL), calls, "{permissions:?}");
            for subject in [&ask, nodes::CALL] {
                assert_eq!(may(subscribe, &[], subject), hears, "{permissions:?}");
            }
        }
    }

    #[test]
    fn no_client_hears_another() {
        let mine: ModelName = "a".parse().expect("a name");
        let ann = ClientName::new("ANN").expect("a name");
        let ben = ClientName::new("BEN").expect("a name");
        let anns = format!("{}.x.1", Role::Client.inbox_prefix(Some(&ann)));
        for (name, expected) in [(&ann, true), (&ben, false)] {
            let client = Permissions::client(name, &[], false);
            assert_eq!(may(&client.subscribe, &[], &anns), expected);
            assert!(!may(&client.publish, &[], &anns));
        }
        assert!(may(&Permissions::coordinator(&mine).publish, &[], &anns));
        assert!(!may(&Permissions::worker(&mine).publish, &[], &anns));
    }

    #[test]
    fn a_client_that_reads_results_gets_no_jobs() {
        let mine: ModelName = "a".parse().expect("a name");
        let name = ClientName::new("ANN").expect("a name");
        let subjects = Subjects::new(&mine);
        let next = |stream: &str, of| format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{of}");
        let create = |filter: String| {
            format!("$JS.API.CONSUMER.CREATE.{}.x.{filter}", subjects.results_stream())
        };
        for models in [vec![mine.clone()], vec![]] {
            let client = Permissions::client(&name, &models, true);
            let may_publish = |subject: &str| may(&client.publish, &client.publish_denied, subject);
            for good in [
                create(subjects.result(&RequestId::random())),
                next(&subjects.results_stream(), "x"),
            ] {
                assert!(may_publish(&good), "{good}");
            }
            for bad in [
                next(&subjects.jobs_stream(), JOB_CONSUMER),
                next(&subjects.results_stream(), JOB_CONSUMER),
                format!("$JS.API.CONSUMER.DELETE.{}.{JOB_CONSUMER}", subjects.jobs_stream()),
                create(subjects.job()),
                create(subjects.cancel(&RequestId::random())),
                format!("$JS.API.CONSUMER.CREATE.{}.x", subjects.jobs_stream()),
                format!("$JS.API.STREAM.MSG.GET.{}", subjects.jobs_stream()),
                format!("$JS.API.STREAM.DELETE.{}", subjects.results_stream()),
                subjects.result(&RequestId::random()),
                format!("$JS.ACK.{}.x", subjects.jobs_stream()),
            ] {
                assert!(!may_publish(&bad), "{bad}");
            }
            assert!(!may(&client.subscribe, &[], &subjects.result_all()));
            assert!(!may(&client.subscribe, &[], &subjects.job()));
        }
    }

    #[test]
    fn only_a_clients_own_subjects_are_answered() {
        for good in ["_INBOX.client.ANN.x", "_INBOX.abc", "my.events"] {
            assert!(is_answerable(good), "{good}");
        }
        for bad in [
            "stagebus.v1.m.probe",
            "$JS.API.STREAM.DELETE.x",
            "_INBOX.coordinator.m.x",
            "_INBOX.worker.m.x",
            "_INBOX.operator.ANN.x",
            "stagebus.node.v1.call",
        ] {
            assert!(!is_answerable(bad), "{bad}");
        }
    }

    #[test]
    fn a_reply_subject_names_the_client_that_hears_it() {
        let ann = ClientName::new("ANN").expect("a name");
        let inbox = format!("{}.x.1", Role::Client.inbox_prefix(Some(&ann)));
        assert_eq!(client_of(&inbox), Some("ANN"));
        for nobodys in [
            "_INBOX.client.ANN",
            "_INBOX.client..x",
            "_INBOX.client.ANN.",
            "_INBOX.x.ANN.1",
            "my.events",
        ] {
            assert_eq!(client_of(nobodys), None, "{nobodys}");
        }
    }

    #[test]
    fn only_the_operator_who_asked_hears_the_answer() {
        let (mine, ann) = ("a".parse().expect("a name"), ClientName::new("ANN").expect("a name"));
        let ben = ClientName::new("BEN").expect("a name");
        let inbox = format!("{}.x.1", Role::Operator.inbox_prefix(Some(&ann)));
        assert!(may(&Permissions::worker(&mine).publish, &[], &inbox));
        assert!(may(&Permissions::operator(&ann, &[], &[]).subscribe, &[], &inbox));
        assert!(!may(&Permissions::operator(&ben, &[], &[]).subscribe, &[], &inbox));
        assert!(!may(&Permissions::client(&ann, &[], true).subscribe, &[], &inbox));
    }
}
