//! Plots as SVG.

use std::fmt::Display;

use anyhow::anyhow;
use plotters::chart::ChartContext;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    BLACK, Cartesian2d, ChartBuilder, Circle, Color as _, IntoDrawingArea as _, LineSeries,
    PathElement, RGBColor, Rectangle, SVGBackend, SeriesLabelPosition, WHITE,
};

/// Width and height in pixels.
const SIZE: (u32, u32) = (760, 420);

/// Above the bars is room for the legend, which names them.
const LEGEND_ROOM: f64 = 1.5;

/// Colours of the series in turn: Okabe and Ito's, which people who see few colours can tell apart.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(240, 228, 66),
    RGBColor(0, 0, 0),
];

/// Named points, in the order of their x values.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// The points.
    pub points: Vec<(f64, f64)>,
}

/// What a plot shows.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    /// Lines through points.
    Lines {
        /// What x is.
        x: String,
        /// The lines.
        series: Vec<Series>,
    },
    /// A bar for each name.
    Bars(Vec<(String, f64)>),
}

/// One plot.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    /// Name of its file, without the ending.
    pub name: String,
    /// Its title.
    pub title: String,
    /// What y is.
    pub y: String,
    /// What it shows.
    pub shape: Shape,
}

impl Plot {
    /// Whether there is nothing to show.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match &self.shape {
            Shape::Lines { series, .. } => series.iter().all(|series| series.points.is_empty()),
            Shape::Bars(bars) => bars.is_empty(),
        }
    }

    /// Draws it.
    ///
    /// # Errors
    /// Values that cannot be drawn, such as infinite ones.
    pub fn svg(&self) -> anyhow::Result<String> {
        let mut svg = String::new();
        match &self.shape {
            Shape::Lines { x, series } => self.lines(&mut svg, x, series)?,
            Shape::Bars(bars) => self.bars(&mut svg, bars)?,
        }
        Ok(svg)
    }

    fn lines(&self, svg: &mut String, x: &str, series: &[Series]) -> anyhow::Result<()> {
        let xs = series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
        let ys = series.iter().flat_map(|series| series.points.iter().map(|point| point.1));
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..top(xs)?, 0.0..top(ys)?)
            .map_err(failed)?;
        chart.configure_mesh().x_desc(x).y_desc(&self.y).draw().map_err(failed)?;
        for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
            let points = || series.points.iter().copied();
            chart
                .draw_series(LineSeries::new(points(), colour.stroke_width(2)))
                .map_err(failed)?
                .label(&series.name)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            let dots = points().map(|point| Circle::new(point, 3, colour.filled()));
            chart.draw_series(dots).map_err(failed)?;
        }
        // Costs rise with x: most of ours leave that corner free.
        legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
        area.present().map_err(failed)
    }

    fn bars(&self, svg: &mut String, bars: &[(String, f64)]) -> anyhow::Result<()> {
        let highest = top(bars.iter().map(|bar| bar.1))?;
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(10)
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..bars.len() as f64, 0.0..highest * LEGEND_ROOM)
            .map_err(failed)?;
        let mesh = &mut chart.configure_mesh();
        mesh.disable_x_mesh().x_labels(0).y_desc(&self.y).draw().map_err(failed)?;
        for (index, ((name, value), colour)) in bars.iter().zip(COLOURS.iter().cycle()).enumerate()
        {
            let (left, right) = (index as f64 + 0.15, index as f64 + 0.85);
            let bar = Rectangle::new([(left, 0.0), (right, *value)], colour.filled());
            chart
                .draw_series([bar])
                .map_err(failed)?
                .label(format!("{name}: {value:.2}"))
                .legend(|(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        }
        legend(&mut chart, SeriesLabelPosition::UpperRight)?;
        area.present().map_err(failed)
    }
}

fn legend<'a>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>,
    position: SeriesLabelPosition,
) -> anyhow::Result<()> {
    let mut labels = chart.configure_series_labels();
    labels.position(position).border_style(BLACK.mix(0.3));
    labels.background_style(WHITE.mix(0.85)).draw().map_err(failed)
}

/// The end of an axis: a little above the largest value.
fn top(values: impl Iterator<Item = f64>) -> anyhow::Result<f64> {
    let largest = values.fold(0.0, f64::max);
    anyhow::ensure!(largest.is_finite(), "a value is infinite");
    Ok(if largest > 0.0 { largest * 1.15 } else { 1.0 })
}

/// The drawing library's errors borrow what is drawn on.
fn failed(error: impl Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_axes_a_legend_and_all_their_points() {
        let series = Series { name: "2 nodes".to_owned(), points: vec![(0.0, 1.0), (10.0, 5.0)] };
        let plot = Plot {
            name: "x".to_owned(),
            title: "A title".to_owned(),
            y: "ms".to_owned(),
            shape: Shape::Lines { x: "tokens".to_owned(), series: vec![series] },
        };
        let svg = plot.svg().expect("it can be drawn");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        for text in ["A title", "2 nodes", "tokens", "ms"] {
            assert!(svg.contains(text), "{text} is missing: {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 2);
    }

    #[test]
    fn bars_say_their_values() {
        let shape = Shape::Bars(vec![("full".to_owned(), 1.5), ("top-1".to_owned(), 12.25)]);
        let (title, y) = ("A title".to_owned(), "tok/s".to_owned());
        let plot = Plot { name: "x".to_owned(), title, y, shape };
        let svg = plot.svg().expect("it can be drawn");
        assert!(svg.contains("full: 1.50") && svg.contains("top-1: 12.25"), "{svg}");
        assert!(!plot.is_empty());
        let infinite = Plot { shape: Shape::Bars(vec![("a".to_owned(), f64::INFINITY)]), ..plot };
        infinite.svg().expect_err("no axis is that long");
    }
}
