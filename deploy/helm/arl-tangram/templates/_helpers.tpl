{{- /* (list $ name): the name and the labels of an object. */}}
{{- define "tangram.meta" -}}
{{- $root := index . 0 -}}
name: {{ $root.Release.Name }}-{{ index . 1 }}
labels:
  {{- include "tangram.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{- /* (list $ component): the labels by which its pods are found. */}}
{{- define "tangram.selector" -}}
app.kubernetes.io/name: arl-tangram
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "tangram.matches" -}}
selector:
  matchLabels:
    {{- include "tangram.selector" . | nindent 4 }}
{{- end }}

{{- define "tangram.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tangram.secret" -}}
{{ .Values.existingSecret | default (printf "%s-tangram" .Release.Name) }}
{{- end }}

{{- /* (list $ names…): variables from the secret. */}}
{{- define "tangram.secrets" -}}
{{- $root := index . 0 }}
{{- range rest . }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ include "tangram.secret" $root }}, key: {{ . }}}}
{{- end }}
{{- end }}

{{- /* (list $ settings): settings of one component, over those of all. */}}
{{- define "tangram.settings" -}}
{{- $root := index . 0 }}
{{- $all := merge (dict) (index . 1) $root.Values.settings }}
{{- if $root.Values.services }}{{ $_ := set $all "TANGRAM_SERVICES_FILE" "/etc/tangram/services.toml" }}{{ end }}
{{- if $root.Values.metrics.enabled }}{{ $_ := set $all "TANGRAM_METRICS_HOST" "0.0.0.0" }}{{ $_ := set $all "TANGRAM_METRICS_PORT" "9400" }}{{ end }}
{{- /* Helm reads numbers of files as floats, which it would write as 2e+06. */}}
{{- range $name, $value := $all }}
- {name: {{ $name }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- end }}

{{- /* What all pods have. */}}
{{- define "tangram.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Where pods go, of values that name it. */}}
{{- define "tangram.place" -}}
{{- range $key := list "nodeSelector" "tolerations" "priorityClassName" "runtimeClassName" }}
{{- with get $ $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tangram.user" -}}
{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{- define "tangram.noRights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* A look at a process starts a Python of its own, so it is not taken often. */}}
{{- define "tangram.health" -}}
exec: {command: [tangram, health, {{ . }}]}
initialDelaySeconds: 5
periodSeconds: 30
timeoutSeconds: 20
{{- end }}

{{- define "tangram.claim" -}}
{{- if .size }}
volumeClaimTemplates:
  - metadata: {name: data}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .className }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ .size }}}}
{{- end }}
{{- end }}

{{- /*
(dict "root" $ "name" "web" "command" (list …) "secrets" (list …) "settings" dict "replicas" 1 "resources" dict "port" 8090 "probe" "…" "part" "…"):
the Deployment of a process that keeps nothing. It answers at /`probe` on `port`, or is looked at by `tangram health part`.
*/}}
{{- define "tangram.deployment" -}}
{{- $root := .root -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "tangram.meta" (list $root .name) | nindent 2 }}
spec:
  replicas: {{ .replicas }}
  {{- include "tangram.matches" (list $root .name) | nindent 2 }}
  template:
    metadata:
      labels:
        {{- include "tangram.selector" (list $root .name) | nindent 8 }}
      annotations:
        checksum/services: {{ $root.Values.services | sha256sum }}
    spec:
      {{- include "tangram.pod" $root | nindent 6 }}
      {{- include "tangram.place" $root.Values.hub | nindent 6 }}
      securityContext: {{ include "tangram.user" $root }}
      terminationGracePeriodSeconds: {{ .graceS | default 60 }}
      {{- if gt (int .replicas) 1 }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- include "tangram.selector" (list $root .name) | nindent 14 }}
      {{- end }}
      {{- if has "TANGRAM_DATABASE_URL" .secrets }}
      # It does nothing where the journal is up to date.
      initContainers:
        - name: migrate
          image: {{ include "tangram.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [tangram, db, upgrade]
          env:
            {{- include "tangram.secrets" (list $root "TANGRAM_DATABASE_URL") | nindent 12 }}
          resources:
            {{- toYaml .resources | nindent 12 }}
          securityContext:
            {{- include "tangram.noRights" $root | nindent 12 }}
          volumeMounts: [{name: tmp, mountPath: /tmp}]
      {{- end }}
      containers:
        - name: {{ .name }}
          image: {{ include "tangram.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: {{ toJson .command }}
          env:
            {{- include "tangram.secrets" (concat (list $root) .secrets) | nindent 12 }}
            {{- with .optional }}
            - name: {{ . }}
              valueFrom: {secretKeyRef: {name: {{ include "tangram.secret" $root }}, key: {{ . }}, optional: true}}
            {{- end }}
            {{- include "tangram.settings" (list $root (.settings | default dict)) | nindent 12 }}
          ports:
            {{- if .port }}
            - {name: http, containerPort: {{ .port }}}
            {{- end }}
            {{- if $root.Values.metrics.enabled }}
            - {name: metrics, containerPort: 9400}
            {{- end }}
          readinessProbe:
            {{- if .port }}
            httpGet: {path: {{ .probe }}, port: http}
            {{- else }}
            {{- include "tangram.health" .part | nindent 12 }}
            {{- end }}
          resources:
            {{- toYaml .resources | nindent 12 }}
          securityContext:
            {{- include "tangram.noRights" $root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: state, mountPath: /var/lib/tangram}
            {{- if $root.Values.services }}
            - {name: services, mountPath: /etc/tangram, readOnly: true}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {}}
        - {name: state, emptyDir: {}}
        {{- if $root.Values.services }}
        - {name: services, configMap: {name: {{ $root.Release.Name }}-services}}
        {{- end }}
{{- if gt (int .replicas) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tangram.meta" (list $root .name) | nindent 2 }}
spec:
  maxUnavailable: 1
  {{- include "tangram.matches" (list $root .name) | nindent 2 }}
{{- end }}
{{- end }}

{{- /* (list $ name port): the Service of a component that answers over HTTP. */}}
{{- define "tangram.service" -}}
{{- $root := index . 0 -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "tangram.meta" . | nindent 2 }}
spec:
  type: {{ index . 3 }}
  selector:
    {{- include "tangram.selector" . | nindent 4 }}
  ports: [{name: http, port: {{ index . 2 }}, targetPort: http}]
{{- end }}
