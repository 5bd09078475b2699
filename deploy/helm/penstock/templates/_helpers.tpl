{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "penstock.gatewaySelector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{/* Of all workers; those of one model have penstock/model beside it. */}}
{{- define "penstock.workerSelector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: worker
{{- end }}

{{/* Name of what belongs to the workers of a model; names of Services have no dots. Takes (root, model). */}}
{{- define "penstock.worker" -}}
{{ printf "%s-worker-%s" (index . 0).Release.Name (index . 1 | replace "." "-") | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "penstock.secretName" -}}
{{ .Values.workerSecret.existingSecret | default (printf "%s-worker-secret" .Release.Name) }}
{{- end }}

{{- define "penstock.secretVariable" -}}
- name: PENSTOCK_WORKER_SECRET
  valueFrom:
    secretKeyRef: {name: {{ include "penstock.secretName" . }}, key: worker-secret}
{{- end }}

{{- define "penstock.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "penstock.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.writableVolumes" -}}
- name: cache
  {{- if .existingClaim }}
  persistentVolumeClaim: {claimName: {{ .existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .sizeLimit }}}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- end }}

{{/* A mapping with what another one says in its place, at any depth. Sprig's merge takes false and 0 for absent. */}}
{{- define "penstock.merged" -}}
{{- $merged := deepCopy (index . 0) }}
{{- range $key, $value := index . 1 }}
{{- $before := get $merged $key }}
{{- if and (kindIs "map" $before) (kindIs "map" $value) }}
{{- $value = include "penstock.merged" (list $before $value) | fromYaml }}
{{- end }}
{{- $_ := set $merged $key $value }}
{{- end }}
{{- toYaml $merged }}
{{- end }}

{{/* The settings of the gateways: those of the values, and a model for each group of workers. */}}
{{- define "penstock.settings" -}}
{{- $root := . }}
{{- $models := dict }}
{{- range $name, $given := .Values.workers }}
{{- $worker := include "penstock.merged" (list $root.Values.workerDefaults $given) | fromYaml }}
{{- $address := printf "dns://%s.%s.svc:9000" (include "penstock.worker" (list $root $name)) $root.Release.Namespace }}
{{- $model := dict "model" ($worker.model | default $name) "workers" (list $address) }}
{{- if $worker.aliases }}{{ $_ := set $model "aliases" $worker.aliases }}{{ end }}
{{- $_ := set $models $name $model }}
{{- end }}
{{- $server := dict "host" "0.0.0.0" "port" .Values.gateway.port }}
{{- include "penstock.merged" (list .Values.settings (dict "server" $server "models" $models)) }}
{{- end }}
