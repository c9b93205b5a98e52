//! The model of the request in progress, for the metrics and the log.

use std::sync::{Arc, OnceLock};

tokio::task_local! {
    /// The name of the model of the request in progress; empty until the model is known.
    pub static MODEL: Arc<OnceLock<String>>;
}

/// Notes the model of the request in progress.
pub fn note_model(name: &str) {
    // Outside of a request there is no value. A route that calls another notes the model twice.
    MODEL.try_with(|model| model.get_or_init(|| name.to_string()).len()).ok();
}
