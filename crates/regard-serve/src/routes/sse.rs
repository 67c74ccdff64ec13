//! Answers as server-sent events.

use super::answer::Call;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;

/// An answer that is being sent.
struct Sending {
    call: Call,
    include_usage: bool,
    ready: VecDeque<Event>,
    over: bool,
}

pub(super) fn response(call: Call, include_usage: bool) -> Response {
    let mut sending = Sending { call, include_usage, ready: VecDeque::new(), over: false };
    for chunk in sending.call.greetings() {
        sending.push(chunk);
    }
    let events = stream::unfold(sending, |mut sending| async {
        let event = sending.next().await?;
        Some((Ok::<_, Infallible>(event), sending))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

impl Sending {
    fn push(&mut self, mut chunk: Value) {
        if self.include_usage {
            // Every chunk but the last has it, as in OpenAI's API.
            chunk["usage"] = Value::Null;
        }
        self.send(&chunk);
    }

    fn send(&mut self, data: &Value) {
        self.ready.push_back(Event::default().data(data.to_string()));
    }

    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() && !self.over {
            match self.call.next().await {
                Ok(Some(news)) => {
                    if let Some(part) = self.call.part(&news) {
                        self.push(self.call.chunk(vec![part]));
                    }
                }
                Ok(None) => {
                    if self.include_usage {
                        let mut chunk = self.call.chunk(Vec::new());
                        chunk["usage"] = self.call.usage();
                        self.send(&chunk);
                    }
                    self.end();
                }
                Err(error) => {
                    // The status was sent: clients look for this object.
                    self.send(&error.json());
                    self.end();
                }
            }
        }
        self.ready.pop_front()
    }

    fn end(&mut self) {
        self.over = true;
        self.ready.push_back(Event::default().data("[DONE]"));
    }
}
