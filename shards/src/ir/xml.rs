//! Writes a graph as IR version 11 XML.

use std::io::{self, Write};

use super::graph::{Graph, Node};

impl Graph {
    /// Writes the XML of the graph; constants refer to the weight file by offset.
    pub(crate) fn write_xml(&self, model: &str, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "<?xml version=\"1.0\"?>")?;
        writeln!(out, "<net name=\"{}\" version=\"11\">", escape(model))?;
        writeln!(out, "<layers>")?;
        for (id, node) in self.nodes.iter().enumerate() {
            write_layer(id, node, out)?;
        }
        writeln!(out, "</layers>\n<edges>")?;
        for (to, node) in self.nodes.iter().enumerate() {
            for (port, input) in node.inputs.iter().enumerate() {
                let from_port = self.nodes[input.node].inputs.len() + input.output;
                writeln!(
                    out,
                    "<edge from-layer=\"{}\" from-port=\"{from_port}\" to-layer=\"{to}\" \
                     to-port=\"{port}\"/>",
                    input.node
                )?;
            }
        }
        writeln!(out, "</edges>\n{}</net>", self.model_info)
    }
}

fn write_layer(id: usize, node: &Node, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "<layer id=\"{id}\" name=\"{}\" type=\"{}\" version=\"{}\">",
        escape(&node.name),
        node.kind,
        node.opset
    )?;
    if !node.attributes.is_empty() {
        write!(out, "<data")?;
        for (key, value) in &node.attributes {
            write!(out, " {key}=\"{}\"", escape(value))?;
        }
        writeln!(out, "/>")?;
    }
    if !node.inputs.is_empty() {
        write!(out, "<input>")?;
        for (port, input) in node.inputs.iter().enumerate() {
            write!(out, "<port id=\"{port}\" precision=\"{}\"/>", input.element.precision())?;
        }
        writeln!(out, "</input>")?;
    }
    if !node.outputs.is_empty() {
        write!(out, "<output>")?;
        for (output, element) in node.outputs.iter().enumerate() {
            let port = node.inputs.len() + output;
            write!(out, "<port id=\"{port}\" precision=\"{}\"", element.precision())?;
            if let (0, Some(name)) = (output, &node.tensor_name) {
                write!(out, " names=\"{}\"", escape(name))?;
            }
            write!(out, ">")?;
            for dim in &node.dims {
                write!(out, "<dim>{}</dim>", dim.map_or(-1, |dim| dim as i64))?;
            }
            write!(out, "</port>")?;
        }
        writeln!(out, "</output>")?;
    }
    writeln!(out, "{}</layer>", node.extra)
}

/// Escapes text for an XML attribute. Control characters, which XML cannot hold, become `_`.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => escaped.push('_'),
            c => escaped.push(c),
        }
    }
    escaped
}
