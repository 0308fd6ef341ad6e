{{- define "skyproxy.labels" -}}
app.kubernetes.io/name: skyproxy
{{- end -}}

{{- define "skyproxy.gatewayNamespace" -}}
{{ .Values.gateway.namespace | default .Release.Namespace }}
{{- end -}}
