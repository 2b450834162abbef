//! The shard sets that the broker has, and which of them is meant.

use std::collections::BTreeMap;

use stagebus_bus::{Bus, ModelStore, StoredObject};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::store::{is_content_of, parse_object_name};
use stagebus_shards::manifest::MANIFEST_FILE;

use crate::error::DeliveryError;

/// A shard set on the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSet {
    /// Its fingerprint.
    pub fingerprint: String,
    /// Its files, without the manifest.
    pub files: BTreeMap<String, StoredObject>,
    /// The manifest, which is stored last: without it the set is not complete.
    pub manifest: Option<StoredObject>,
}

impl StoredSet {
    /// Bytes of all its files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.values().chain(&self.manifest).map(|object| object.bytes).sum()
    }

    /// Rises with every push; 0 for a set that is not complete.
    fn pushed(&self) -> u64 {
        self.manifest.as_ref().map_or(0, |manifest| manifest.sequence)
    }
}

/// Lists the shard sets of a model, the one that was pushed last at the end.
///
/// # Errors
/// [`DeliveryError::Store`].
pub async fn list(store: &ModelStore) -> Result<Vec<StoredSet>, DeliveryError> {
    let mut sets: BTreeMap<String, StoredSet> = BTreeMap::new();
    for object in store.objects().await? {
        // Others may keep files of their own in the bucket.
        let Some((fingerprint, file)) = parse_object_name(&object.name) else { continue };
        let set = sets.entry(fingerprint.to_owned()).or_insert_with(|| StoredSet {
            fingerprint: fingerprint.to_owned(),
            files: BTreeMap::new(),
            manifest: None,
        });
        if file == MANIFEST_FILE {
            set.manifest = Some(object);
        } else {
            let file = file.to_owned();
            set.files.insert(file, object);
        }
    }
    let mut sets: Vec<StoredSet> = sets.into_values().collect();
    sets.sort_by_key(StoredSet::pushed);
    Ok(sets)
}

/// The shard set that is meant: the one whose fingerprint begins with `wanted`, else the one that was
/// pushed last.
///
/// # Errors
/// [`DeliveryError::NoSet`], [`DeliveryError::Fingerprint`].
pub fn choose<'a>(
    model: &ModelName,
    sets: &'a [StoredSet],
    wanted: Option<&str>,
) -> Result<&'a StoredSet, DeliveryError> {
    let mut complete = sets.iter().filter(|set| set.manifest.is_some());
    let Some(wanted) = wanted else {
        let last = complete.next_back();
        return last.ok_or_else(|| DeliveryError::NoSet { model: model.clone() });
    };
    let fitting: Vec<_> =
        complete.clone().filter(|set| set.fingerprint.starts_with(wanted)).collect();
    match fitting.as_slice() {
        [set] => Ok(set),
        several => Err(DeliveryError::Fingerprint {
            model: model.clone(),
            wanted: wanted.to_owned(),
            found: several.len(),
            stored: complete.map(|set| set.fingerprint.clone()).collect(),
        }),
    }
}

/// The model that is meant: the one that was named, else the only one that is stored.
///
/// # Errors
/// [`DeliveryError::NothingStored`], [`DeliveryError::SeveralModels`], [`DeliveryError::Store`].
pub async fn find_model(bus: &Bus, named: Option<&ModelName>) -> Result<ModelName, DeliveryError> {
    if let Some(model) = named {
        return Ok(model.clone());
    }
    let mut models = bus.stored_models().await?;
    match models.len() {
        0 => Err(DeliveryError::NothingStored),
        1 => Ok(models.swap_remove(0)),
        _ => Err(DeliveryError::SeveralModels { models }),
    }
}

/// Removes a shard set, and what an interrupted push left of it. Whoever pulls it fails.
///
/// # Errors
/// [`DeliveryError::Store`].
pub async fn remove(store: &ModelStore, set: &StoredSet) -> Result<(), DeliveryError> {
    // Without its manifest nobody chooses it any more.
    for object in set.manifest.iter().chain(set.files.values()) {
        store.remove(object).await?;
    }
    for content in store.contents().await?.into_keys() {
        if is_content_of(&content, &set.fingerprint) {
            store.remove_content(&content).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(fingerprint: &str, pushed: Option<u64>) -> StoredSet {
        let manifest = pushed.map(|sequence| StoredObject {
            name: "m".to_owned(),
            content: "c".to_owned(),
            bytes: 7,
            part_bytes: 1,
            sha256: String::new(),
            sequence,
        });
        StoredSet { fingerprint: fingerprint.to_owned(), files: BTreeMap::new(), manifest }
    }

    #[test]
    fn the_last_one_is_meant_unless_a_fingerprint_says_otherwise() {
        let model: ModelName = "m".parse().expect("a name");
        let sets = [set("cc", None), set("ab", Some(1)), set("aa", Some(2))];
        let chosen = |wanted| choose(&model, &sets, wanted).map(|set| set.fingerprint.as_str());
        assert_eq!(chosen(None).expect("there is one"), "aa");
        assert_eq!(chosen(Some("ab")).expect("there is one"), "ab");
        for (wanted, expected) in [("a", 2), ("x", 0), ("cc", 0)] {
            let error = chosen(Some(wanted)).expect_err("not one");
            let DeliveryError::Fingerprint { found, stored, .. } = error else {
                panic!("{error}");
            };
            assert_eq!((found, stored), (expected, vec!["ab".to_owned(), "aa".to_owned()]));
        }
        let nothing = choose(&model, &sets[..1], None).expect_err("it is not complete");
        assert!(matches!(nothing, DeliveryError::NoSet { .. }), "{nothing}");
    }
}
