{{/* Labels by which services, policies and the StatefulSet select the nodes. */}}
{{- define "timerd.selector" -}}
app.kubernetes.io/name: timer-cluster
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "timerd.labels" -}}
{{ include "timerd.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Of each container. */}}
{{- define "timerd.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
image: {{ print .Values.image.repository (ternary "@" ":" (hasPrefix "sha256:" $tag)) $tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* Settings of each pod: where its image comes from, and where it runs. */}}
{{- define "timerd.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . | quote }}}
  {{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Settings of a pod that runs timerctl, beside its containers, volumes and restarts. */}}
{{- define "timerd.clientPod" -}}
{{ include "timerd.pod" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* name=address of every node, as TIMERD_PEERS has it. */}}
{{- define "timerd.peers" -}}
{{- $release := .Release.Name -}}
{{- range $i := until (int .Values.replicas) -}}
{{- if $i }},{{ end }}{{ $release }}-{{ $i }}={{ $release }}-{{ $i }}.{{ $release }}-nodes.$(NAMESPACE).svc:7401
{{- end -}}
{{- end }}

{{- define "timerd.founders" -}}
{{- $release := .Release.Name -}}
{{- range $i := until (int .Values.founders) -}}
{{- if $i }},{{ end }}{{ $release }}-{{ $i }}
{{- end -}}
{{- end }}

{{- define "timerd.env" -}}
- name: TIMERD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- {name: TIMERD_CLUSTER_ID, value: {{ .Values.clusterId | default .Release.Name | quote }}}
- {name: TIMERD_DATA, value: /var/lib/timerd/data}
- {name: TIMERD_GRPC, value: "0.0.0.0:7401"}
- {name: TIMERD_REPLICATION, value: "0.0.0.0:7404"}
- {name: TIMERD_HTTP, value: "0.0.0.0:7411"}
- name: TIMERD_HTTP_NAMES
  value: "{{ .Release.Name }},{{ .Release.Name }}.$(NAMESPACE),{{ .Release.Name }}.$(NAMESPACE).svc,{{ .Release.Name }}.$(NAMESPACE).svc.cluster.local{{ range .Values.httpNames }},{{ . }}{{ end }}"
- name: TIMERD_PEERS
  value: {{ include "timerd.peers" . | quote }}
- name: FOUNDERS
  value: {{ include "timerd.founders" . | quote }}
{{- end }}

{{/* With TLS: the port for the other nodes, and this node's files. Overrides `insecure`. */}}
{{- define "timerd.tlsEnv" -}}
{{- $release := .Release.Name -}}
- {name: TIMERD_INSECURE, value: "false"}
- {name: TIMERD_LINK, value: "0.0.0.0:7402"}
- {name: TIMERD_LINKS, value: {{ include "timerd.peers" . | replace ".svc:7401" ".svc:7402" | quote }}}
- {name: TIMERD_TLS__CA, value: /etc/timerd/tls/$(TIMERD_NAME)/ca.crt}
- {name: TIMERD_TLS__CLIENT_CA, value: /etc/timerd/tls/client-ca.crt}
- {name: TIMERD_TLS__CERTIFICATE, value: /etc/timerd/tls/$(TIMERD_NAME)/tls.crt}
- {name: TIMERD_TLS__KEY, value: /etc/timerd/tls/$(TIMERD_NAME)/tls.key}
- {name: TIMERD_TLS__ACCESS, value: /etc/timerd/tls/access.toml}
{{- if .Values.tls.tokens }}
- {name: TIMERD_TLS__TOKENS, value: /etc/timerd/tls/tokens.toml}
- {name: TIMERD_TOKENS, value: "0.0.0.0:7403"}
{{- end }}
{{- end }}

{{- define "timerd.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Labels by which the Deployment of the continuous backup selects its pod. */}}
{{- define "timerd.followSelector" -}}
app.kubernetes.io/name: timer-cluster-backup
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: follow
{{- end }}

{{/* The certificates of a pod that takes backups. */}}
{{- define "timerd.backupVolumes" -}}
{{- if .Values.tls.enabled -}}
volumes:
  - name: nodes
    secret:
      secretName: {{ .Release.Name }}-0-tls
      items: [{key: ca.crt, path: ca.crt}]
  - name: backup
    secret: {secretName: {{ .Release.Name }}-backup-tls, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Likewise of a pod of the backup. */}}
{{- define "timerd.backupPod" -}}
{{ include "timerd.clientPod" . }}
{{- with .Values.backup.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* A container of the backup. root: the chart's scope; args: of timerctl; store: without nodes. */}}
{{- define "timerd.backup" -}}
{{- with .root -}}
{{ include "timerd.image" . }}
command: [timerctl]
args: {{ toJson $.args }}
env:
  - {name: STORE, value: {{ .Values.backup.store | quote }}}
  {{- if not $.store }}
  - {name: TIMERCTL_ENDPOINTS, value: "{{ .Release.Name }}:7401"}
  {{- end }}
  {{- if and .Values.tls.enabled (not $.store) }}
  - {name: TIMERCTL_TLS_CA, value: /etc/timerd/nodes/ca.crt}
  - {name: TIMERCTL_TLS_CERT, value: /etc/timerd/backup/tls.crt}
  - {name: TIMERCTL_TLS_KEY, value: /etc/timerd/backup/tls.key}
  {{- end }}
envFrom:
  - secretRef: {name: {{ .Release.Name }}-backup, optional: true}
securityContext: {{- include "timerd.confined" . | nindent 2 }}
resources: {{- toYaml .Values.backup.resources | nindent 2 }}
{{- if and .Values.tls.enabled (not $.store) }}
volumeMounts:
  - {name: nodes, mountPath: /etc/timerd/nodes, readOnly: true}
  - {name: backup, mountPath: /etc/timerd/backup, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
