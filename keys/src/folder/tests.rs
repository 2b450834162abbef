//! A folder of keys from its making to its last change.

use super::*;

fn name(text: &str) -> HolderName {
    text.parse().expect("a valid name")
}

fn plan() -> Plan {
    let models = vec!["m-1".parse().expect("a valid name")];
    Plan {
        models,
        results: false,
        hosts: vec!["broker.example".to_owned(), "192.0.2.1".to_owned()],
    }
}

fn made() -> (TempDir, KeyFolder) {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folder = KeyFolder::create(&parent.path().join("keys"), &plan()).expect("made");
    (parent, folder)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_new_fleet_has_a_key_for_every_role_and_says_nothing_secret() {
    let (_parent, folder) = made();
    let names: Vec<&str> = folder.holders().iter().map(|holder| holder.name.as_str()).collect();
    assert_eq!(names, ["client", "operator", "coordinator-m-1", "worker-m-1"]);
    let users = read(&folder.broker().join(USERS));
    let list = read(&folder.path.join(LIST));
    for holder in folder.holders() {
        let seed = read(&folder.seed_of(holder));
        let pair = nkeys::KeyPair::from_seed(seed.trim()).expect("a seed");
        assert_eq!(pair.public_key(), holder.public_key.as_str());
        assert!(users.contains(holder.public_key.as_str()));
        let shown = format!("{users}{list}{folder:?}");
        assert!(!shown.contains(seed.trim()), "a secret is shown");
        let configuration = read(&folder.folder_of(holder).join("stagebus.toml"));
        assert!(configuration.contains("tls://broker.example:4222"), "{configuration}");
    }
    assert_eq!(KeyFolder::open(&folder.path).expect("opens").list, folder.list);
    let configuration = |name: &str| read(&folder.path.join(name).join("stagebus.toml"));
    assert!(configuration("worker-m-1").contains("[worker]\nmodel = \"m-1\"\n"));
    assert!(configuration("coordinator-m-1").contains("[coordinator]\nmodel = \"m-1\"\n"));
    assert!(!configuration("client").contains("model"));
    // An operator for all models stores those that the fleet has keys for, and no others.
    assert!(users.contains("\"$JS.API.STREAM.CREATE.OBJ_STAGEBUS_MODEL_m-1\""), "{users}");
    for kind in ["MODEL", "DRAFT", "PROBE"] {
        let delete = format!("\"$JS.API.STREAM.DELETE.OBJ_STAGEBUS_{kind}_m-1\"");
        assert!(users.contains(&delete), "{delete} is missing in {users}");
    }
    assert_eq!(users.matches("$JS.API.STREAM.DELETE.").count(), 3, "{users}");
}

#[cfg(unix)]
#[test]
fn only_the_owner_reads_secrets() {
    use std::os::unix::fs::PermissionsExt as _;
    let (_parent, folder) = made();
    let mut secrets = vec![folder.path.join("ca.key"), folder.broker().join("server.key")];
    secrets.extend(folder.holders().iter().map(|holder| folder.seed_of(holder)));
    secrets.extend(folder.holders().iter().map(|holder| folder.folder_of(holder)));
    secrets.extend([folder.path.clone(), folder.broker()]);
    for path in secrets {
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{} has mode {mode:o}", path.display());
    }
}

#[test]
fn keys_are_added_and_removed_and_never_written_over() {
    let (parent, mut folder) = made();
    let again = KeyFolder::create(&folder.path, &plan()).expect_err("it exists");
    assert!(matches!(again, KeyError::Exists { .. }), "{again}");
    let grant = |text: &str, role, models| Grant { name: name(text), role, models, results: false };
    let ann = folder.add(grant("ann", HolderRole::Client, vec![]), None).expect("added").clone();
    let users = folder.broker().join(USERS);
    assert!(read(&users).contains(ann.public_key.as_str()));
    let taken = folder.add(grant("ann", HolderRole::Client, vec![]), None).expect_err("taken");
    assert!(matches!(taken, KeyError::Taken { .. }), "{taken}");
    let reserved = folder.add(grant("broker", HolderRole::Client, vec![]), None);
    assert!(matches!(reserved, Err(KeyError::Reserved { .. })), "{reserved:?}");
    let no_model = folder.add(grant("w", HolderRole::Worker, vec![]), None);
    assert!(matches!(no_model, Err(KeyError::Models { found: 0, .. })), "{no_model:?}");

    let of_worker = Grant { results: true, ..grant("w", HolderRole::Worker, plan().models) };
    let with_results = folder.add(of_worker, None);
    assert!(matches!(with_results, Err(KeyError::Results { .. })), "{with_results:?}");

    let theirs = nkeys::KeyPair::new_user();
    let grant_bob = || grant("bob", HolderRole::Client, vec![]);
    for wrong in ["", "U", "not a key", &nkeys::KeyPair::new_account().public_key()] {
        let refused = folder.add(grant_bob(), Some(wrong));
        assert!(matches!(refused, Err(KeyError::PublicKey { .. })), "{wrong}: {refused:?}");
    }
    let bob = folder.add(grant_bob(), Some(&theirs.public_key())).expect("added").clone();
    assert!(!folder.seed_of(&bob).is_file(), "the secret half is not ours");

    folder.remove(&name("ann")).expect("removed");
    assert!(!read(&users).contains(ann.public_key.as_str()));
    assert!(!folder.folder_of(&ann).is_dir());
    let gone = folder.remove(&name("ann")).expect_err("gone");
    assert!(matches!(gone, KeyError::Unknown { .. }), "{gone}");
    for left in ["bob", "client", "operator", "coordinator-m-1"] {
        folder.remove(&name(left)).expect("removed");
    }
    let last = folder.remove(&name("worker-m-1")).expect_err("the last one");
    assert!(matches!(last, KeyError::Last { .. }), "{last}");
    let entries = fs::read_dir(parent.path()).expect("a folder").count();
    assert_eq!(entries, 1, "something was left beside the keys");
}

#[test]
fn a_list_that_is_none_is_refused() {
    let (_parent, folder) = made();
    let path = folder.path.join(LIST);
    let list = read(&path);
    fs::write(&path, list.replace("\"version\": 1", "\"version\": 2")).expect("writable");
    let newer = KeyFolder::open(&folder.path).expect_err("another version");
    assert!(matches!(newer, KeyError::Version { found: 2, .. }), "{newer}");
    fs::write(&path, list.replace("\"client\"", "\"a b\"")).expect("writable");
    let wrong = KeyFolder::open(&folder.path).expect_err("no name");
    assert!(matches!(wrong, KeyError::List { .. }), "{wrong}");
    let none = KeyFolder::open(&folder.broker()).expect_err("no list");
    assert!(matches!(none, KeyError::File { .. }), "{none}");
}

#[test]
fn a_host_that_is_none_leaves_nothing_behind() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let path = parent.path().join("keys");
    let plan = Plan { hosts: vec!["b\u{fc}ro".to_owned()], ..plan() };
    let error = KeyFolder::create(&path, &plan).expect_err("not a name for a certificate");
    assert!(matches!(error, KeyError::Certificate { .. }), "{error}");
    assert_eq!(fs::read_dir(parent.path()).expect("a folder").count(), 0);
}
