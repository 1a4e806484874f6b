// SPDX-License-Identifier: Apache-2.0
// The OpenAPI document for people: addresses, and the fields of what they take.

import { element } from "./elements.js";

const openapi = await (await fetch("openapi.json")).json();
const shape = (reference) => openapi.components.schemas[reference.split("/").at(-1)];

function kind(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(kind).filter((each) => each !== "null").join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const bounds = low !== undefined && high !== undefined && high < 2 ** 31 ? `, ${low} to ${high}` : "";
  return `${schema.type ?? "any"}${bounds}`;
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, each]) =>
    element("tr", {}, element("td", {}, required.has(name) ? `${name} *` : name), element("td", {}, kind(each))),
  );
  return element("table", {}, element("tbody", {}, ...rows));
}

for (const [path, methods] of Object.entries(openapi.paths)) {
  for (const [method, each] of Object.entries(methods)) {
    const takes = each.requestBody?.content["application/json"].schema;
    const section = element(
      "section",
      {},
      element("h2", {}, element("span", { class: "method" }, method.toUpperCase()), ` ${path}`),
      element("p", {}, each.summary),
    );
    if (takes) section.append(element("details", {}, element("summary", {}, "Fields"), fields(shape(takes.$ref))));
    document.getElementById("paths").append(section);
  }
}
