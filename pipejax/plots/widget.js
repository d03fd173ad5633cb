// The page in a cell of a notebook; the model's `selected` is the chosen op.

export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.title = "Explorer of schedules";
    frame.srcdoc = model.get("page");
    frame.style.cssText = "width: 100%; border: 0";
    const resize = () => { frame.height = model.get("height"); };
    const takeMessage = ({ source, data }) => {
      if (source !== frame.contentWindow || typeof data?.selectedOp !== "string") return;
      model.set("selected", data.selectedOp);
      model.save_changes();
    };
    resize();
    model.on("change:height", resize);
    window.addEventListener("message", takeMessage);
    el.append(frame);
    return () => window.removeEventListener("message", takeMessage);
  },
};
