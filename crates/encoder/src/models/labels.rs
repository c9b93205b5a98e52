//! The labels of a classifier, from `config.json`.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Deserialize;

use crate::{ConfigError, Error, Result, load::Json};

/// The labels of a classifier, in the order of its outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels(Vec<String>);

/// The keys of `config.json` about labels.
#[derive(Deserialize)]
struct LabelConfig {
    id2label: Option<BTreeMap<String, Name>>,
    num_labels: Option<usize>,
    _num_labels: Option<usize>,
}

/// The name of a label. transformers accepts a number and prints it as in the file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "id2label: expected the name of a label: a string or a number")]
enum Name {
    Text(String),
    Number(serde_json::Number),
}

impl Name {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number) => number.to_string(),
        }
    }
}

/// Maximum number of generated names. It limits their memory if `num_labels` is wrong.
const MAX_LABELS: usize = 1_000_000;

impl Labels {
    /// Reads the labels of a `config.json`; `path` names the file in errors.
    ///
    /// The names come from `id2label`. If `id2label` is missing or empty, or its length differs
    /// from `num_labels`, the names are `LABEL_0` to `LABEL_{n−1}`, where n is `num_labels`,
    /// otherwise `_num_labels`, otherwise 2, as in Hugging Face.
    ///
    /// # Errors
    /// [`crate::FileError::Json`] for invalid JSON; [`ConfigError::Unsupported`] if the ids are not
    /// consecutive from 0; [`ConfigError::Value`] for more than 1,000,000 generated names;
    /// [`mha::Error::Zero`] if the number of labels is 0.
    /// # Examples
    /// ```
    /// let json = br#"{"id2label": {"1": "good", "0": "bad"}}"#;
    /// let labels = encoder::Labels::from_json(json, "config.json")?;
    /// assert_eq!(labels.names(), ["bad", "good"]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        Self::read(&Json::new(json.to_vec(), path))
    }

    /// [`Self::from_json`] for a parsed file.
    pub(crate) fn read(json: &Json) -> Result<Self> {
        let config: LabelConfig = json.to()?;
        let named = config.id2label.filter(|labels| !labels.is_empty());
        let named = named.filter(|labels| config.num_labels.is_none_or(|n| n == labels.len()));
        let Some(labels) = named else {
            let (field, n) = match (config.num_labels, config._num_labels) {
                (None, Some(n)) => ("_num_labels", n),
                (n, _) => ("num_labels", n.unwrap_or(2)),
            };
            if n > MAX_LABELS {
                let expected = "at most 1,000,000";
                return Err(ConfigError::Value { field, expected, got: n as f64 }.into());
            }
            if n == 0 {
                return Err(mha::Error::Zero { field }.into());
            }
            return Ok(Self((0..n).map(|i| format!("LABEL_{i}")).collect()));
        };
        let name = |id: usize| {
            labels.get(&id.to_string()).map(Name::text).ok_or_else(|| {
                Error::unsupported(
                    json.path(),
                    "id2label",
                    "consecutive ids from 0",
                    format!("without id {id}"),
                )
            })
        };
        (0..labels.len()).map(name).collect::<Result<_>>().map(Self)
    }

    /// The label of a model with one score, which has transformers' default name.
    pub(super) fn of_one_score() -> Self {
        Self(vec!["LABEL_0".to_string()])
    }

    /// The names of the labels.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// The names made unique: the label's index is appended to a name that several labels share.
    ///
    /// # Examples
    /// ```
    /// let json = br#"{"id2label": {"0": "a", "1": "b", "2": "a"}}"#;
    /// let labels = encoder::Labels::from_json(json, "config.json")?;
    /// assert_eq!(labels.distinct_names(), ["a (0)", "b", "a (2)"]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn distinct_names(&self) -> Vec<String> {
        distinct(&self.0)
    }
}

fn distinct(names: &[String]) -> Vec<String> {
    let mut count: HashMap<&str, usize> = HashMap::new();
    for name in names {
        *count.entry(name).or_default() += 1;
    }
    let mut taken: HashSet<String> = names.iter().cloned().collect();
    let distinct = names.iter().enumerate().map(|(i, name)| {
        if count[name.as_str()] == 1 {
            return name.clone();
        }
        let mut numbered = format!("{name} ({i})");
        while !taken.insert(numbered.clone()) {
            numbered.push('\'');
        }
        numbered
    });
    distinct.collect()
}

/// Reads the labels from `config.json`. Only models with labels call it.
pub(crate) type ReadLabels<'a> = dyn Fn() -> Result<Labels> + 'a;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_label_may_be_a_number() -> Result<()> {
        let json = br#"{"id2label": {"0": 0, "1": -1.5, "2": "x"}}"#;
        assert_eq!(Labels::from_json(json, "config.json")?.names(), ["0", "-1.5", "x"]);
        for got in ["null", "true", "[]"] {
            let json = format!(r#"{{"id2label": {{"0": {got}}}}}"#);
            let error = Labels::from_json(json.as_bytes(), "config.json").unwrap_err().to_string();
            let expected = "id2label: expected the name of a label: a string or a number";
            assert!(error.starts_with("config.json ") && error.contains(expected), "{error}");
        }
        Ok(())
    }

    #[test]
    fn labels_with_the_same_name_are_numbered() {
        let names = ["a", "b", "a"].map(String::from);
        assert_eq!(distinct(&names), ["a (0)", "b", "a (2)"]);
        assert_eq!(distinct(&names[..2]), ["a", "b"]);
        let names = ["a", "a", "a (0)"].map(String::from);
        assert_eq!(distinct(&names), ["a (0)'", "a (1)", "a (0)"]);
    }
}
