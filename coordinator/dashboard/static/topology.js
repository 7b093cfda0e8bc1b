// The topology map: draws a scene of coordinator/dashboard/scene.py. Texts become text nodes, never markup.
import { h } from "vue";

const CARD = [156, 52];

function line(one) {
  const parts = [
    h("title", one.title),
    h("path", { d: one.path, class: "map-hit" }),
    h("path", { d: one.path, class: ["map-line", `way-${one.kind}`], "stroke-width": one.width }),
  ];
  if (one.moving) {
    parts.push(h("path", { d: one.path, class: "map-flow", "stroke-width": Math.max(1.5, one.width * 0.6) }));
  }
  return h("g", { key: one.id }, parts);
}

function label(one) {
  const width = 6.1 * one.label.length + 14;
  return h("g", { key: `label ${one.id}`, class: "map-rate", "aria-hidden": "true" }, [
    h("rect", { x: one.x - width / 2, y: one.y - 10, width, height: 20, rx: 10 }),
    h("text", { x: one.x, y: one.y + 4, "text-anchor": "middle" }, one.label),
  ]);
}

function shape(mark) {
  if (mark.shape === "dot") {
    const gap = mark.anchor === "end" ? -14 : 14;
    return [
      h("circle", { cx: mark.x, cy: mark.y, r: 15, class: "map-hit" }),
      h("circle", { cx: mark.x, cy: mark.y, r: mark.reduces ? 8.5 : 6.5, class: "map-dot" }),
      h(
        "text",
        { x: mark.x + gap, y: mark.y + 4, "text-anchor": mark.anchor, transform: `rotate(${mark.angle} ${mark.x} ${mark.y})` },
        [mark.text, h("tspan", { class: "map-dim", dx: 6 }, mark.detail)],
      ),
    ];
  }
  if (mark.shape === "hub") {
    return [
      h("rect", { x: mark.x - 92, y: mark.y - 29, width: 184, height: 58, rx: 14, class: "map-hub" }),
      h("text", { x: mark.x, y: mark.y - 4, "text-anchor": "middle", class: "map-name" }, mark.text),
      h("text", { x: mark.x, y: mark.y + 15, "text-anchor": "middle", class: "map-dim" }, mark.detail),
    ];
  }
  const [x, y] = [mark.x - CARD[0] / 2, mark.y - CARD[1] / 2];
  return [
    h("rect", { x, y, width: CARD[0], height: CARD[1], rx: 10, class: "map-card" }),
    h("circle", { cx: x + 17, cy: y + 18, r: 5, class: "map-dot" }),
    h("text", { x: x + 30, y: y + 22, class: "map-name" }, mark.text),
    h("text", { x: x + 17, y: y + 41, class: "map-dim" }, mark.detail),
  ];
}

export default {
  props: { scene: Object },
  emits: ["open"],
  methods: {
    mark(mark) {
      const open = () => this.$emit("open", mark.id);
      const node = mark.shape !== "hub";
      return h(
        "g",
        {
          key: mark.id,
          class: ["map-mark", `state-${mark.state}`],
          tabindex: node ? 0 : undefined,
          role: node ? "button" : "img",
          "aria-label": mark.title,
          onClick: node ? open : undefined,
          onKeydown: (event) => {
            if (node && (event.key === "Enter" || event.key === " ")) {
              event.preventDefault();
              open();
            }
          },
        },
        [h("title", mark.title), ...shape(mark)],
      );
    },
  },
  render() {
    const { width, height, lines, marks } = this.scene;
    return h("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Topology" }, [
      ...lines.map(line),
      ...marks.map(this.mark),
      ...lines.filter((one) => one.label).map(label),
    ]);
  },
};
