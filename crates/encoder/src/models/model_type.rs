//! The keys of `config.json` that determine the architecture.

use serde::Deserialize;

use crate::{Error, Result};

/// The keys of `config.json` that determine the architecture.
#[derive(Deserialize)]
pub(crate) struct ModelType {
    pub(crate) model_type: Option<String>,
    pub(crate) position_embedding_type: Option<String>,
    architectures: Option<Vec<String>>,
}

impl ModelType {
    /// The `model_type`. An absent key means `bert`, since the first BERT checkpoints lack it.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] if `model_type` is absent and
    /// `architectures` names a class that is not BERT's; `path` names the file.
    pub(crate) fn name(&self, path: &str) -> Result<&str> {
        if let Some(model_type) = &self.model_type {
            return Ok(model_type);
        }
        let mut classes = self.architectures.iter().flatten();
        match classes.find(|class| !class.starts_with("Bert")) {
            Some(class) => {
                let expected = "the model_type of this class; an absent key means bert";
                Err(Error::unsupported(
                    path,
                    "model_type",
                    expected,
                    format!("(absent, architectures {class})"),
                ))
            }
            None => Ok("bert"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Json;

    #[test]
    fn a_config_without_model_type_is_berts_unless_it_names_another_class() -> Result<()> {
        let name = |json: &str| {
            let keys: ModelType = Json::new(json.as_bytes().to_vec(), "config.json").to()?;
            keys.name("config.json").map(String::from)
        };
        for json in [
            "{}",
            r#"{"architectures": null}"#,
            r#"{"architectures": []}"#,
            r#"{"architectures": ["BertModel", "BertForMaskedLM"]}"#,
        ] {
            assert_eq!(name(json)?, "bert");
        }
        assert_eq!(name(r#"{"model_type": "x", "architectures": ["RobertaModel"]}"#)?, "x");
        for class in ["RobertaModel", "XLMRobertaModel", "CamembertModel"] {
            let json = format!(r#"{{"architectures": ["BertModel", "{class}"]}}"#);
            assert_eq!(
                name(&json).unwrap_err().to_string(),
                format!(
                    "config.json: model_type (absent, architectures {class}) is not supported: \
                     expected the model_type of this class; an absent key means bert"
                )
            );
        }
        Ok(())
    }
}
